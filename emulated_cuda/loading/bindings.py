"""What packages that bring a CUDA runtime of their own find instead: this library, or a refusal.

A runtime that is linked into a package statically is not replaced by the library. It asks the
driver for private interfaces, which the emulated one does not have, and fails. The functions of
``cuda.bindings`` can be replaced all the same, because its modules pass them to each other in
capsules when they are imported. CuPy's cannot, so its error says what to do.
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from typing import Any

from emulated_cuda import imports

_OF_BINDINGS = (
    "cuda.bindings._internal.runtime",
    "cuda.bindings._internal.runtime_ptds",
    "cuda.bindings._bindings.cyruntime",  # of CUDA 12
)
_OF_CUPY = "cupy_backends.cuda.api.runtime"
_ADVICE = (
    " (CuPy is not supported by the emulated device: it brings a CUDA runtime of its own, which "
    "requires NVIDIA's driver. Use torch or NumPy, or a GPU)"
)


def replace_runtimes(functions: ctypes.CDLL) -> None:
    """Replace the runtime of packages as soon as the program imports them.

    Args:
        functions: the library of the emulated device.
    """
    for module in _OF_BINDINGS:
        imports.call_after(module, partial(_replace_capsules, module, functions))
    imports.call_after(_OF_CUPY, _explain_errors_of_cupy)


def _replace_capsules(module: str, functions: ctypes.CDLL) -> None:
    api = ctypes.pythonapi
    get_name, set_pointer = api.PyCapsule_GetName, api.PyCapsule_SetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    set_pointer.argtypes = [ctypes.py_object, ctypes.c_void_p]
    capsules: dict[str, Any] = getattr(sys.modules[module], "__pyx_capi__", {})
    for name, capsule in capsules.items():
        signature = get_name(capsule)
        ours = getattr(functions, name.lstrip("_"), None)
        if ours is not None and signature is not None and signature.startswith(b"cudaError_t "):
            set_pointer(capsule, ctypes.cast(ours, ctypes.c_void_p))


def _explain_errors_of_cupy() -> None:
    error = getattr(sys.modules[_OF_CUPY], "CUDARuntimeError", None)
    if error is None:
        return
    before = error.__init__

    def explain(self: Any, status: int) -> None:
        before(self, status)
        self.args = (f"{self.args[0]}{_ADVICE}",)

    error.__init__ = explain
