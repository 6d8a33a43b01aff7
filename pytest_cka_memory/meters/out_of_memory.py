"""Decide whether an exception says that the memory of a device is exhausted."""

import torch

from pytest_cka_memory.meters.torch_versions import DEVICE_IS_FULL, HOST_IS_FULL


def is_out_of_memory(error: BaseException, device: str) -> bool:
    """Return whether `error` was raised because `device` has too little memory.

    Args:
        error: any exception.
        device: a device as torch names it: ``cpu``, ``cuda:0``. An accelerator's tests may exhaust
            the memory of the host instead; that is not memory of `device`.
    """
    if device.partition(":")[0] == "cpu":
        texts = HOST_IS_FULL
        if isinstance(error, MemoryError):
            return True
    else:
        texts = DEVICE_IS_FULL
        if isinstance(error, torch.OutOfMemoryError):
            return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
