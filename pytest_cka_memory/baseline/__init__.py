"""Committed baselines: the file, its update, and the limit it sets."""
