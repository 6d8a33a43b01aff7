"""A CUDA card without a GPU: programs for CUDA run unchanged on torch's own CUDA build.

A library in C++ takes the place of the CUDA runtime and driver, with the memory of the machine as
that of the device. Torch's allocator runs as on a card, so its counters have the figures that it
would have there, and errors of memory come where they would come. No kernel runs: what one would
have computed, torch computes on the CPU.

Run a program on such a card::

    python -m emulated_cuda --card h100 train.py

or load the card before anything imports torch:

>>> import emulated_cuda
>>> emulated_cuda.load("t4")
>>> import torch
>>> torch.ones(3, device="cuda").sum().item()
3.0

It requires Linux on x86-64 and a CUDA build of torch; no GPU, driver or CUDA toolkit. Importing
this package imports neither torch nor the library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emulated_cuda.cards import CARDS
    from emulated_cuda.errors import DeviceAssertError, DeviceError, StaleValueError
    from emulated_cuda.estimating import Estimate, estimate
    from emulated_cuda.loading.loaded import load, loaded

__all__ = [
    "CARDS",
    "DeviceAssertError",
    "DeviceError",
    "Estimate",
    "StaleValueError",
    "estimate",
    "load",
    "loaded",
]

_MODULES = {
    "CARDS": "cards",
    "DeviceAssertError": "errors",
    "DeviceError": "errors",
    "Estimate": "estimating",
    "StaleValueError": "errors",
    "estimate": "estimating",
    "load": "loading.loaded",
    "loaded": "loading.loaded",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: every Python process that an emulating program starts imports this.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
