"""The module that torch makes available as ``torch.privateuseone``."""

import ctypes

import torch

_library: ctypes.CDLL


def take(library: ctypes.CDLL) -> None:
    """Use this compiled library."""
    global _library
    _library = library


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def get_device_name(index: int = 0) -> str:
    return f"Host Device {index}"


def manual_seed_all(seed: int) -> None:
    """Do nothing: random numbers are the CPU's."""


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def hold(size: int) -> None:
    """Allocate a block without a tensor, as a library does for its workspace."""
    _library.hostdevice_hold(ctypes.c_size_t(size))
