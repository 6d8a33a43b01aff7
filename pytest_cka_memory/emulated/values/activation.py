"""Turn values on for the life of the process, as soon as torch is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from pytest_cka_memory.errors import DeviceError

_is_on = False


def are_computed() -> bool:
    """Whether values are computed in this process."""
    return _is_on


def compute_values(path: str, *, required: bool) -> None:
    """Compute values from now on, or from the moment when torch is imported.

    Args:
        path: of the library of the emulated device, which is loaded.
        required: raise if the torch version cannot; otherwise no values are computed then.
    """
    if "torch" in sys.modules:
        _turn_on(path, required=required)
    else:
        sys.meta_path.insert(0, _AfterTorch(path, required))


class _AfterTorch(MetaPathFinder):
    """Finds torch as usual, and turns values on once it is imported."""

    def __init__(self, path: str, required: bool) -> None:
        self._path = path
        self._required = required

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _turn_on(self._path, required=self._required)

        loader: Any = spec.loader
        loader.exec_module = exec_module
        return spec


def _turn_on(path: str, *, required: bool) -> None:
    global _is_on
    import torch

    from pytest_cka_memory.emulated import torch_private

    missing = torch_private.missing()
    if missing:
        if required:
            raise DeviceError(
                f"the emulated device computes values with {', '.join(missing)}, which torch "
                f"{torch.__version__} lacks; use a newer version, or write values=off"
            )
        return
    from pytest_cka_memory.emulated.values import operators, registration

    functions = operators.Library(path)
    operators.use_library(functions)
    registration.register_all()
    # Torch prefers cuDNN's attention on an H100 and newer cards, and cuDNN cannot plan it here.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch_private.disable_fusion()
    functions.compute_values(1)
    _is_on = True


def register_new_operators() -> None:
    """Compute also the operators of a library that was loaded after torch, such as torchvision."""
    if _is_on:
        from pytest_cka_memory.emulated.values import registration

        registration.register_all()
