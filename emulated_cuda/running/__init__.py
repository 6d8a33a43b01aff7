"""``python -m emulated_cuda``: runs a program on emulated devices and says what memory it took."""
