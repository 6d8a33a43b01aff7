"""Whether memory of the host is pinned, so that an accelerator can copy it directly."""

from typing import Any

import torch

_ACCELERATORS = ("cuda", "xpu")


def may_be_pinned() -> bool:
    """Whether there may be pinned memory: not as long as no accelerator is initialized."""
    modules = (getattr(torch, name, None) for name in _ACCELERATORS)
    return any(module is not None and module.is_initialized() for module in modules)


def is_pinned(value: Any) -> bool:
    """Whether the memory of a tensor or storage is pinned; False if that is not known.

    No accelerator is initialized for this.
    """
    if not may_be_pinned():
        return False
    try:
        return value.device.type == "cpu" and bool(value.is_pinned())
    except (RuntimeError, TypeError):  # it has no memory of its own
        return False
