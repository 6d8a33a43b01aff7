"""The JSON report: written, described and read back."""
