"""Load the device in a process whose parent emulates one."""

from __future__ import annotations

import os

from emulated_cuda.loading import children, torch_import


def load_before_torch() -> None:
    """Load the device that the environment names as soon as this process imports torch."""
    if children.VARIABLE in os.environ:
        torch_import.call_before(_load)


def _load() -> None:
    from emulated_cuda.loading.loaded import load, loaded  # most processes do not import torch

    setting = children.setting_of(os.environ)
    setting.pop("records", None)
    if setting and loaded() is None:
        load(**setting)
