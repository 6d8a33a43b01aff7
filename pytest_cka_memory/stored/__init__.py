"""What is kept in files: baselines, the history, the JSON report, each read with every check."""
