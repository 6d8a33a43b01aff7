"""Counting of tensor storages from Python, for devices without counters."""
