"""Follows the import of Triton, without which none of this package is needed."""

from __future__ import annotations

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

    def prepare() -> None:
        from emulated_cuda.values.compiled import launches

        launches.start(path)
        triton_private.note_compiled(launches.note_compiled)

    imports.call_after(triton_private.MODULE, prepare)
    refuse = partial(torch_private.refuse_packages, _NO_PACKAGES)
    imports.call_after(torch_versions.PACKAGING.value[0], refuse)
