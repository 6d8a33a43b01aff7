"""Load the device in a process whose parent emulates one."""

from __future__ import annotations

import os

from emulated_cuda import imports
from emulated_cuda.loading import children

_FIRST = ("torch", "cuda.bindings", "cupy_backends", "numba_cuda")
"""Packages that look for a driver: whichever a program imports first."""


def load_before_torch() -> None:
    """Load the device that the environment names as soon as this process imports torch.

    Other packages that look for a driver load it too.
    """
    if children.VARIABLE in os.environ:
        for module in _FIRST:
            imports.call_before(module, _load)


def _load() -> None:
    from emulated_cuda.loading.loaded import load, loaded  # most processes do not import torch

    setting = children.setting_of(os.environ)
    setting.pop("records", None)
    if setting and loaded() is None:
        load(**setting)
