"""Follows the import of Triton, whose kernels the rest of this package computes."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial

from emulated_cuda import imports, torch_private, torch_versions, triton_private
from emulated_cuda.errors import WITHOUT_VALUES

_NO_PACKAGES = (
    "AOTInductor is not supported on the emulated device: code that it compiles has no text from "
    "which its kernels could be computed, so its results would not be known; compile the model "
    f"with torch.compile, run the program that torch.export returns, {WITHOUT_VALUES} to measure "
    "memory only, or use a GPU"
)


def start(path: str) -> None:
    """Compute the kernels of Triton as soon as the program imports it.

    Args:
        path: of the library of the emulated device, which is loaded.
    """
    refuse = partial(torch_private.refuse_packages, _NO_PACKAGES)
    imports.call_after(torch_versions.PACKAGING.value[0], refuse)
    module = triton_private.MODULE
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        return
    # Not when the program imports Triton: that may be inside a region, which would count the
    # constants of these modules, or inside a transform of torch.func, which would wrap them.
    from emulated_cuda.triton import launches

    def prepare() -> None:
        launches.start(path)
        triton_private.note_compiled(launches.note_compiled)

    imports.call_after(module, prepare)
