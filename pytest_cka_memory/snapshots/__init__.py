"""Snapshots that torch has written on any card: read, explained, and replayed on an emulated one."""
