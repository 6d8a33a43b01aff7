"""The meter for devices whose allocator keeps counters."""
