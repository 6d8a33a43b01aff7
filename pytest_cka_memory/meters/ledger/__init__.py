"""Counting of tensor storages from Python, where nothing can be compiled or read."""
