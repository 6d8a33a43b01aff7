"""Batches of any structure, and the data loaders that yield them."""
