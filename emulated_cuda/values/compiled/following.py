"""Follows the import of Triton, without which none of this package is needed."""

from __future__ import annotations

from emulated_cuda import imports, triton_private


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
