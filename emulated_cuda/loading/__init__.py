"""Loads the library that takes the place of the CUDA runtime, in this process and its children."""
