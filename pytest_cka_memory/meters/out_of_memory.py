"""Decide whether an exception says that the memory of a device is exhausted."""

import torch

_DEVICE_TEXTS = ("out of memory", "STATUS_ALLOC_FAILED")
"""What the driver, cuBLAS and cuDNN report outside torch's allocator, as a ``RuntimeError``."""
_CPU_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough")
"""What torch's CPU allocator reports on Linux and macOS, and on Windows."""


def is_out_of_memory(error: BaseException, device: str) -> bool:
    """Return whether `error` was raised because `device` has too little memory.

    Args:
        error: any exception.
        device: a device as torch names it: ``cpu``, ``cuda:0``. An accelerator's tests may exhaust
            the memory of the host instead; that is not memory of `device`.
    """
    if device.partition(":")[0] == "cpu":
        texts = _CPU_TEXTS
        if isinstance(error, MemoryError):
            return True
    else:
        texts = _DEVICE_TEXTS
        if isinstance(error, torch.OutOfMemoryError):
            return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
