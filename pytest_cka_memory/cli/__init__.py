"""The command line ``python -m pytest_cka_memory``."""
