"""Note the kernels that Triton compiles, and compute each launch of one, from any launcher."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from emulated_cuda import torch_private
from emulated_cuda.errors import WITHOUT_VALUES
from emulated_cuda.triton import (  # noqa: F401  each adds its rows to the table
    assembly,
    control,
    descriptors,
    libdevice,
    memory,
    numbers,
    reductions,
    regular,
    shapes,
)
from emulated_cuda.triton.parser import accessed, parse
from emulated_cuda.triton.programs import Code, Programs, prepare
from emulated_cuda.triton.ttir import (
    Function,
    KernelError,
    NotComputed,
    Operation,
    Type,
    all_operations,
)
from emulated_cuda.values import graphs, staleness, tensors_at
from emulated_cuda.values.computing import on_the_cpu

_ELEMENTS_AT_ONCE = 2**19
"""Elements of a value for all programs that run at once. With so many, calling an operation costs
little beside its arithmetic; with so few, a value stays in the processor's cache, and all values of
a launch take a few MB."""


@cache
def _keep_freed_memory() -> None:
    """Let the values of one batch of programs use the memory of those before.

    glibc returns large blocks to the system as soon as they are freed, and each page costs a fault
    when it is used again, until the program has freed a block of this size.
    """
    torch.empty(2**24, dtype=torch.uint8)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: on a busy machine, its threads wait long for each other."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Kernel:
    """A kernel of Triton.

    Args:
        text: in TTIR.
        name: of the kernel.

    Raises:
        NotComputed: if the text is not understood.
    """

    def __init__(self, text: str, name: str) -> None:
        functions = parse(text)
        self.name = name
        public = [function for function in functions.values() if function.is_public]
        if not public:
            raise NotComputed("cannot find a public function in the code of the kernel")
        self._main = public[0]
        self.accessed = accessed(self._main)
        # Not raised: what such a kernel writes must be known, so that it can be marked as stale.
        self.problem: NotComputed | None = None
        """Why it is not computed, if it uses something that has no meaning here."""
        self._codes: dict[str, tuple[Function, list[Code]]] = {}
        try:
            self._codes = {key: (op, prepare(op.blocks)) for key, op in functions.items()}
        except NotComputed as problem:
            self.problem = problem
        operations = [op for f in functions.values() for op in all_operations(f.blocks)]
        self._at_once = _at_once(operations)

    @property
    def argument_types(self) -> list[Type]:
        """The types of the arguments, in the order in which a launch passes them."""
        return self._main.argument_types

    def launch(self, grid: tuple[int, int, int], arguments: list[Any]) -> None:
        """Compute all programs of a grid.

        Args:
            grid: the numbers of programs in x, y and z.
            arguments: numbers, addresses and descriptors, see :meth:`read_arguments`.

        Raises:
            KernelError: if the kernel would fail on a card.
        """
        count = math.prod(grid)
        if count > self._at_once:
            _keep_freed_memory()
        with _one_thread():
            for start in range(0, count, self._at_once):
                ids = torch.arange(start, min(count, start + self._at_once))
                Programs(self._codes, grid, ids, self.name).call(self._main.name, arguments)

    def addresses(self, positions: frozenset[int], pointers: Any) -> list[int]:
        """Return the addresses that arguments at these positions hold.

        Args:
            positions: of addresses and descriptors.
            pointers: to each argument, as ``cuLaunchKernel`` gets them.
        """
        # A descriptor begins with its address.
        return [ctypes.c_uint64.from_address(pointers[i]).value for i in sorted(positions)]

    def read_arguments(self, pointers: Any) -> list[Any]:
        """Return the arguments of a launch.

        Args:
            pointers: to each argument, as ``cuLaunchKernel`` gets them.
        """
        return [_argument(kind, pointers[i]) for i, kind in enumerate(self.argument_types)]


def _at_once(operations: list[Operation]) -> int:
    """Return how many programs may run at once.

    Programs that wait for earlier ones, such as at a lock, run one by one.
    """
    names = {op.name for op in operations}
    # A program that spins on a lock would wait for one that runs in step with it, for ever.
    waits = "scf.while" in names and any(name.startswith("tt.atomic") for name in names)
    if waits or names & {"tt.atomic_cas", "tt.atomic_poll"}:
        return 1
    kinds = (kind for op in operations for kind in op.result_types)
    largest = max((math.prod(kind.shape) for kind in kinds), default=1)
    return max(1, _ELEMENTS_AT_ONCE // largest)


def _argument(kind: Type, address: int) -> Any:
    if kind.is_descriptor:
        return descriptors.from_host(descriptors.TensorMap.from_address(address))
    dtype = kind.dtype
    if dtype is torch.bool:
        return torch.tensor([ctypes.c_uint8.from_address(address).value != 0])
    # Copied, because the launcher's memory is gone when the call returns.
    bits = bytearray(ctypes.string_at(address, dtype.itemsize))
    return torch.frombuffer(bits, dtype=dtype).clone()


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
    memory.use_library(path)
    _library = ctypes.CDLL(path)
    _library.emulated_key_of.restype = ctypes.c_uint64
    number, pointer = ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
    compute = ctypes.CFUNCTYPE(
        *(ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, number, number, number, pointer),
        ctypes.c_void_p,
    )
    read = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_char_p)
    # The library calls these later: without a reference, ctypes would free them.
    _callbacks[:] = [compute(_compute), read(_read_beside)]
    _library.emulated_compute_launches(*_callbacks)


def note_compiled(cubin: bytes, text: str) -> None:
    """Note the text of a kernel in TTIR by its cubin."""
    _texts[_library.emulated_key_of(cubin)] = text


def _read_beside(key: int, path: bytes) -> None:
    """Read the text of a cubin that is loaded from Triton's cache."""
    if key not in _texts:  # Triton writes the text beside the cubin, with another suffix
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
        # The launch may come from inside a mode of the user, such as a FakeTensorMode.
        with torch_private.without_modes(), on_the_cpu():
            return _launch(key, text, name.decode(), (x, y, z), pointers, graphs.capture_of(stream))
    except KernelError as error:
        code: int = _library.emulated_fail_work(str(error).encode(), error.code)
        _library.cudaGetLastError()  # it is this launch's error, and not one of the next call
        return code
    except Exception as error:  # a mistake of this package, not of the user's kernel
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
    if kernel is None:  # a text that is not understood is kept too: it is read once
        try:
            kernel = Kernel(text, name)
        except NotComputed as problem:
            kernel = problem
        _kernels[key] = kernel
    if capture:
        _record(kernel, name, grid, pointers, capture)
        return 0
    if isinstance(kernel, NotComputed):
        # Without its text, not even what it writes is known: all values count as unknown.
        _library.emulated_note_work(f"{name} ({kernel})".encode())
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
        text = f"{name} ({problem})".encode()
        graphs.record(lambda seed: _library.emulated_note_work(text), number=capture)
        return
    # Read now, as a card does: a replay has the arguments of the capture, whatever changed since.
    arguments = kernel.read_arguments(pointers)

    def compute(seed: int) -> None:
        try:
            with on_the_cpu():
                kernel.launch(grid, arguments)
        except KernelError as error:  # nothing returns a status of the driver in a replay
            raise torch.AcceleratorError(f"CUDA error: {error}") from None

    graphs.record(compute, number=capture)


def _mark(kernel: Kernel, pointers: Any, reason: str) -> None:
    """Mark what a kernel may have written as not computed."""
    written = tensors_at(kernel.addresses(kernel.accessed.written, pointers))
    if written is None or not kernel.accessed.is_complete:
        _library.emulated_note_work(f"{kernel.name} ({kernel.problem})".encode())
    else:
        staleness.mark(written, reason)


def _propagate(kernel: Kernel, pointers: Any) -> None:
    """Mark what a kernel has written as stale if it may have read stale values.

    Stale tensors that it has written in part, or may have, stay stale.
    """
    read_and_written = [
        tensors_at(kernel.addresses(positions, pointers))
        for positions in (kernel.accessed.read | kernel.accessed.written, kernel.accessed.written)
    ]
    read, written = (tensors or [] for tensors in read_and_written)
    if None in read_and_written or not kernel.accessed.is_complete:
        _library.emulated_note_work(f"{kernel.name} (which reads values not known)".encode())
    else:
        staleness.propagate(read, written)


def _reason(name: str, problem: NotComputed) -> str:
    return (
        f"the emulated device did not compute the Triton kernel {name}: {problem}. The values "
        "that the kernel should have written are not known; call operators of torch instead, or "
        f"use a GPU. To measure memory only, {WITHOUT_VALUES}"
    )
