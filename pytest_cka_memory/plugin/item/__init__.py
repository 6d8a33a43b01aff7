"""One test: its plan, its measurement, its fixtures, and what else it needs."""
