"""Hooks of the pytest plugin."""
