"""The CPU: its meters, by the blocks of its allocators or by the storages of tensors."""
