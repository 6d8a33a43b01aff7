"""A kernel that is ready to be launched."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from emulated_cuda.values.compiled import (  # noqa: F401  each adds its rows to the table
    assembly,
    atomics,
    control,
    conversions,
    descriptors,
    floats,
    integers,
    libdevice,
    memory,
    messages,
    products,
    reductions,
    regular,
    shapes,
)
from emulated_cuda.values.compiled.errors import NotComputed
from emulated_cuda.values.compiled.operations import Function, Operation, Type, all_operations
from emulated_cuda.values.compiled.parser import parse
from emulated_cuda.values.compiled.pointers import accessed
from emulated_cuda.values.compiled.programs import Code, Programs, prepare

_ELEMENTS_AT_ONCE = 2**19
"""So many programs run at once that a value has this many elements: enough that the time of an
operation is that of its arithmetic, and so few that a value stays in the cache and all values of a
launch together take few MB."""


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
            raise NotComputed("a text without a function that could be launched")
        self._main = public[0]
        self.accessed = accessed(self._main)
        self.problem: NotComputed | None = None
        """Why it is not computed, if it uses something that has no meaning here."""
        self._codes: dict[str, tuple[Function, list[Code]]] = {}
        try:
            self._codes = {key: (one, prepare(one.blocks)) for key, one in functions.items()}
        except NotComputed as problem:
            self.problem = problem
        operations = [one for f in functions.values() for one in all_operations(f.blocks)]
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
    names = {one.name for one in operations}
    waits = "scf.while" in names and any(name.startswith("tt.atomic") for name in names)
    if waits or names & {"tt.atomic_cas", "tt.atomic_poll"}:
        return 1
    kinds = (kind for one in operations for kind in one.result_types)
    largest = max((math.prod(kind.shape) for kind in kinds), default=1)
    return max(1, _ELEMENTS_AT_ONCE // largest)


def _argument(kind: Type, address: int) -> Any:
    if kind.is_descriptor:
        return descriptors.from_host(descriptors.TensorMap.from_address(address))
    dtype = kind.dtype
    if dtype is torch.bool:
        return torch.tensor([ctypes.c_uint8.from_address(address).value != 0])
    bits = bytearray(ctypes.string_at(address, dtype.itemsize))
    return torch.frombuffer(bits, dtype=dtype).clone()
