"""Load the device in a process whose parent emulates one."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from emulated_cuda import imports
from emulated_cuda.loading import children

_PACKAGES = ("torch", "cuda.bindings", "cupy_backends", "numba_cuda")
"""Packages that look for a driver: whichever a program imports first."""
_LIBRARIES = ("libnvidia-ml.so",)
"""How the names of libraries begin that programs load by ctypes, with and without torch: pynvml."""


def load_before_torch() -> None:
    """Load the device that the environment names when this process imports torch or asks for it."""
    if children.VARIABLE in os.environ:
        for module in _PACKAGES:
            imports.call_before(module, _load)
        imports.call_after("ctypes", _load_before_libraries)


def _load_before_libraries() -> None:
    import ctypes  # most processes do not

    load_library = ctypes.CDLL.__init__

    @wraps(load_library)
    def load_device_first(self: Any, name: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(name, str) and name.startswith(_LIBRARIES):
            _load()
        load_library(self, name, *args, **kwargs)

    ctypes.CDLL.__init__ = load_device_first  # type: ignore[method-assign]


def _load() -> None:
    from emulated_cuda.loading.loaded import load, loaded  # most processes do not import torch

    arguments = children.arguments_of(os.environ)
    if arguments and loaded() is None:
        load(**arguments)
