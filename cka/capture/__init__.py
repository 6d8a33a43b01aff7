"""Selects a model's layers and reads their outputs during a forward pass."""
