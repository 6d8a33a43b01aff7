"""Snapshots that torch wrote on any card: read, explained, and replayed on an emulated one."""
