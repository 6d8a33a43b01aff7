"""A CUDA device without a GPU: torch's own CUDA build runs on a library that replaces the runtime.

:mod:`.specification` parses the device's name, :mod:`.loading` loads the library.
"""
