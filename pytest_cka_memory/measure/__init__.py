"""Regions while they are open."""
