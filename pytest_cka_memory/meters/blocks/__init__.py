"""Counting in torch's own allocators, by a small library in C (``csrc``)."""
