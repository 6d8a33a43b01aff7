"""Computes on the CPU what each operator on the emulated device would have computed.

Device memory is host memory. :mod:`.registration` puts a kernel of this package before torch's CUDA
kernel of every operator. It runs torch's kernel, which allocates as on a card and computes nothing,
and then the same operator on CPU tensors at the same addresses (:mod:`.results`).
"""
