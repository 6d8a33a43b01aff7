"""Computes each launch of a kernel that Triton has compiled, whoever launches it.

The driver (csrc/modules.cpp) calls :func:`_compute` with the key of the cubin. Its text in TTIR was
noted when Triton compiled it, or is beside the file from which the cubin was loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path
from typing import Any

import torch

from emulated_cuda import torch_private
from emulated_cuda.errors import WITHOUT_VALUES
from emulated_cuda.values import graphs, staleness
from emulated_cuda.values.compiled import accesses
from emulated_cuda.values.compiled.errors import KernelError, NotComputed
from emulated_cuda.values.compiled.kernel import Kernel
from emulated_cuda.values.computing import on_the_cpu
from emulated_cuda.values.tensors_at import tensors_at

_UNKNOWN_KERNEL = -1  # kUnknownKernel in csrc/modules.cpp
_texts: dict[int, str] = {}
"""Key of a cubin -> its text in TTIR."""
_kernels: dict[int, Kernel | NotComputed] = {}
_library: Any = None
_callbacks: list[Any] = []
_raised: list[type[BaseException]] = []
"""References for the life of the process."""


def start(path: str) -> None:
    """Compute launches from now on.

    Args:
        path: of the library of the emulated device, which is loaded.
    """
    global _library
    accesses.use_library(path)
    _library = ctypes.CDLL(path)
    _library.emulated_key_of.restype = ctypes.c_uint64
    number, pointer = ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
    compute = ctypes.CFUNCTYPE(
        *(ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, number, number, number, pointer),
        ctypes.c_void_p,
    )
    read = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_char_p)
    _callbacks[:] = [compute(_compute), read(_read_beside)]
    _library.emulated_compute_launches(*_callbacks)


def note_compiled(cubin: bytes, text: str) -> None:
    """Note the text of a kernel in TTIR by its cubin."""
    _texts[_library.emulated_key_of(cubin)] = text


def _read_beside(key: int, path: bytes) -> None:
    """Read the text of a cubin that is loaded from Triton's cache."""
    if key not in _texts:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            file = Path(path.decode()).with_suffix(".ttir")
            _texts[key] = file.read_text(encoding="utf-8")


def _compute(
    key: int, name: bytes, x: int, y: int, z: int, pointers: Any, stream: int | None
) -> int:
    """Compute a launch; return 0 or an error of the driver."""
    text = _texts.get(key)
    if text is None:
        return _UNKNOWN_KERNEL
    try:
        with torch_private.without_modes(), on_the_cpu():
            return _launch(key, text, name.decode(), (x, y, z), pointers, graphs.capture_of(stream))
    except KernelError as error:
        code: int = _library.emulated_fail_work(str(error).encode(), error.code)
        _library.cudaGetLastError()  # it is this launch's error, and not one of the next call
        return code
    except Exception as error:
        _library.emulated_note_work(f"{name.decode()} (which failed: {error!r})".encode())
        return 0
    except BaseException as error:  # such as Ctrl-C: it cannot pass through the driver
        _raised.append(type(error))
        thread = ctypes.c_ulong(threading.get_ident())
        _library.emulated_raise_later(thread, ctypes.py_object(type(error)))
        return 0


def _launch(
    key: int, text: str, name: str, grid: tuple[int, int, int], pointers: Any, capture: int
) -> int:
    """Compute a launch, or record it in the graph `capture` if that is not 0."""
    kernel = _kernels.get(key)
    if kernel is None:
        try:
            kernel = Kernel(text, name)
        except NotComputed as problem:
            kernel = problem
        _kernels[key] = kernel
    if capture:
        _record(kernel, name, grid, pointers, capture)
        return 0
    if isinstance(kernel, NotComputed):
        _library.emulated_note_work(f"{name} (of which {kernel} is not understood)".encode())
        return 0
    may_be_stale = staleness.is_possible()
    if kernel.problem is None:
        kernel.launch(grid, kernel.read_arguments(pointers))
        if may_be_stale:
            _propagate(kernel, pointers)
    else:
        _mark(kernel, pointers, _reason(name, kernel.problem))
    return 0


def _record(
    kernel: Kernel | NotComputed, name: str, grid: tuple[int, int, int], pointers: Any, capture: int
) -> None:
    """Compute a launch at each replay of a graph."""
    problem = kernel if isinstance(kernel, NotComputed) else kernel.problem
    if isinstance(kernel, NotComputed) or problem is not None:
        text = f"{name} (which uses {problem})".encode()
        graphs.record(lambda step: _library.emulated_note_work(text), number=capture)
        return
    arguments = kernel.read_arguments(pointers)

    def compute(step: int) -> None:
        try:
            with on_the_cpu():
                kernel.launch(grid, arguments)
        except KernelError as error:
            raise torch.AcceleratorError(f"CUDA error: {error}") from None

    graphs.record(compute, number=capture)


def _mark(kernel: Kernel, pointers: Any, reason: str) -> None:
    """Mark what a kernel may have written as not computed."""
    written = tensors_at(kernel.addresses(kernel.accessed.written, pointers))
    if written is None or not kernel.accessed.is_complete:
        _library.emulated_note_work(f"{kernel.name} (which uses {kernel.problem})".encode())
    else:
        staleness.mark(written, reason)


def _propagate(kernel: Kernel, pointers: Any) -> None:
    """Mark what a kernel has written as stale if it may have read stale values.

    Stale tensors that it has written in part, or may have, stay stale.
    """
    found = [
        tensors_at(kernel.addresses(positions, pointers))
        for positions in (kernel.accessed.read | kernel.accessed.written, kernel.accessed.written)
    ]
    read, written = (tensors or [] for tensors in found)
    if None in found or not kernel.accessed.is_complete:
        _library.emulated_note_work(f"{kernel.name} (which reads values not known)".encode())
    else:
        staleness.propagate(read, written)


def _reason(name: str, problem: NotComputed) -> str:
    return (
        f"the kernel {name} of Triton was not computed on the emulated device, because it uses "
        f"{problem}, so values that it may have written are not known; call operators of torch in "
        f"its place, {WITHOUT_VALUES} to measure memory only, or use a GPU"
    )
