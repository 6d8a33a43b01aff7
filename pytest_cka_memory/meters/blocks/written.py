"""Blocks that the library has listed, and the stacks, modules and contexts noted with them.

A region's end lists all blocks that are live, which may be 100,000, and mostly nobody reads them:
so a Python object is made only of those that are read, and a column is read in one pass.
"""

import ctypes
import sys
import sysconfig
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_int64, sizeof
from functools import cache, partial
from types import CodeType, ModuleType
from typing import Any, Generic, NamedTuple, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from pytest_cka_memory.core.allocations import (
    INSIDE,
    AllocationGroup,
    Context,
    FramesSite,
    Freed,
    RawFrames,
    SharedFramesSite,
)
from pytest_cka_memory.meters import blocks as library
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.blocks import Block

Known = TypeVar("Known")
Item = TypeVar("Item")
Write = Callable[[Any, int], int]
"""Writes blocks to a C array of this size, and returns how many there are."""
_BLOCK_BYTES = sizeof(Block)
_MOVERS = ("to", "to_empty", "cpu", "cuda", "xpu", "type", "half", "bfloat16", "float", "double")
"""The methods of a module that allocate its parameters again."""
_LONGEST_PATH = 512
"""Bytes of the longest path of a module that is read; longer ones are cut."""


class WrittenBlocks(Sequence[Block]):
    """The blocks that a function of the library has written to one buffer.

    Args:
        size: the most blocks that there may be; 40 bytes are allocated for each.
        write: the function.
    """

    def __init__(self, size: int, write: Write) -> None:
        self._buffer = bytearray(size * _BLOCK_BYTES)
        self._blocks = (Block * size).from_buffer(self._buffer)
        self._count = write(self._blocks, size)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> list[Block]: ...
    def __getitem__(self, index: int | slice) -> Block | list[Block]:
        if isinstance(index, slice):
            return [self._blocks[place] for place in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._blocks[index % self._count]

    @property
    def addresses(self) -> list[int]:
        """The address of each block."""
        return self._column("address")

    @property
    def sizes(self) -> list[int]:
        """The bytes of each block."""
        return self._column("bytes")

    @property
    def serials(self) -> list[int]:
        """The number of each allocation."""
        return self._column("serial")

    @property
    def stacks(self) -> list[int]:
        """The stack of each allocation."""
        return self._column("stack")

    def _column(self, name: str) -> list[int]:
        if not self._count:  # as after most tests
            return []
        field = getattr(Block, name)
        words = memoryview(self._buffer)
        numbers = words.cast("q") if field.size == sizeof(c_int64) else words.cast("I")
        per_block = _BLOCK_BYTES // field.size
        first, end = field.offset // field.size, self._count * per_block
        return numbers[first:end:per_block].tolist()


def notes_contexts() -> bool:
    """Whether the library can note contexts; that of an older checkout cannot."""
    return hasattr(library.functions(), "stacks_note_context")


@cache
def note_contexts() -> tuple[CodeType, ...]:
    """Make the library note the functions of torch that show what memory is allocated for.

    Returns:
        The code of these functions, which must not be freed: the library knows it by its address.
    """
    codes = dict(_contexts()) if notes_contexts() else {}
    for code, context in codes.items():
        library.functions().stacks_note_context(id(code), context)
    return (*codes, *_note_engine())


def _note_engine() -> tuple[CodeType, ...]:
    """Make the library note in which function a thread waits for an accelerator's backward pass."""
    code = getattr(torch_private.RUN_BACKWARD, "__code__", None)
    if code is None or not hasattr(library.functions(), "stacks_note_engine"):
        return ()
    library.functions().stacks_note_engine(id(code))
    return (code,)


def note_own_pass(code: CodeType) -> None:
    """Make the library know the function in which this project runs a backward pass only to wait.

    A thread in it has not started the pass whose allocations are noted.

    Args:
        code: of the function; it must not be freed, as the library knows it by its address.
    """
    if hasattr(library.functions(), "stacks_note_own_pass"):
        library.functions().stacks_note_own_pass(id(code))


class BackwardThreads(NamedTuple):
    """What torch's threads for the backward passes of accelerators have done so far."""

    events: int
    """How many blocks of accelerators they have allocated and freed."""
    devices: tuple[int, ...]
    """The numbers of the devices whose threads have."""


def threads_in_backward() -> BackwardThreads:
    """Return what these threads have done."""
    devices = ctypes.c_uint64()
    events = library.functions().callers_in_backward(ctypes.byref(devices))
    bits = devices.value
    return BackwardThreads(events, tuple(n for n in range(bits.bit_length()) if bits >> n & 1))


def _contexts() -> Iterator[tuple[CodeType, Context]]:
    for function, context in _functions():
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield code, context


def _functions() -> Iterator[tuple[Any, Context]]:
    yield nn.Module.__call__, Context.FORWARD
    yield torch.autograd.backward, Context.BACKWARD
    yield torch.autograd.grad, Context.BACKWARD
    yield Optimizer.profile_hook_step(Optimizer.step), Context.STEP
    yield getattr(torch_private.LOADER_ITERATOR, "__next__", None), Context.LOADER
    for name in _MOVERS:
        yield getattr(nn.Module, name, None), Context.MODULE
    for kind in _classes_in(nn):
        yield vars(kind).get("__init__"), Context.MODULE
    for kind in _classes_in(torch.optim):
        yield vars(kind).get(torch_private.STATE_MAKER), Context.STATE


def _classes_in(module: ModuleType) -> set[type]:
    """Return the classes of a module, and their bases, that torch defines."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    bases = {base for kind in classes for base in kind.__mro__}
    return {base for base in bases if base.__module__.startswith(("torch.nn.", "torch.optim."))}


def frames_of(stack: int) -> RawFrames:
    """Return the frames of a stack as pairs of code and last instruction, innermost first."""
    codes = (ctypes.c_void_p * library.MAX_FRAMES)()
    last = (ctypes.c_int * library.MAX_FRAMES)()
    count = library.functions().stacks_read(stack, codes, last)
    return tuple(
        (ctypes.cast(codes[number] or 0, ctypes.py_object).value, last[number])
        for number in range(count)
    )


def site_of(stack: int) -> FramesSite | None:
    """Return where the memory of a stack was allocated; None if no frame was noted."""
    frames = frames_of(stack)
    module = _module_of(stack)[0] if notes_modules() else 0
    return SharedFramesSite(frames, module) if frames else None


def _module_of(stack: int) -> tuple[int, int]:
    """Return the identity of the innermost module that was running, and the context; 0 if none."""
    context = ctypes.c_uint32()
    return library.functions().stacks_module(stack, ctypes.byref(context)), context.value


def context_of(stack: int) -> Context | None:
    """Return in which context a stack was noted; None if contexts are not."""
    return Context(_module_of(stack)[1]) if notes_contexts() else None


def frames_with_context(stack: int) -> RawFrames:
    """Return the frames of a stack, and first the function of torch that shows what it is for.

    That function is one of the frames, of which only those of users' code are noted.
    """
    frames = frames_of(stack)
    code = _code_of().get(context_of(stack) or Context.UNKNOWN)
    return frames if code is None else ((code, 0), *frames)


@cache
def _code_of() -> dict[Context, CodeType]:
    """Return the first function of torch that shows each context."""
    codes: dict[Context, CodeType] = {}
    for code, context in _contexts():
        codes.setdefault(context, code)
    return codes


@cache
def notes_modules() -> bool:
    """Note the innermost running module of each stack, if the layout of frames here is known."""
    functions = library.functions()
    is_known = (3, 10) <= sys.version_info < (3, 15) and sys.implementation.name == "cpython"
    if not is_known or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    if not hasattr(functions, "stacks_note_modules"):
        return False

    def trial(first: object) -> bool:
        code = torch.nn.Module.__call__.__code__
        return bool(functions.stacks_note_modules(id(code), id(first)))

    return trial(object())


def module_path(module: int) -> str:
    """Return the path in its network of a module that was noted; empty if none was."""
    path = ctypes.create_string_buffer(_LONGEST_PATH)
    library.functions().modules_path(module, path, _LONGEST_PATH)
    return path.value.decode(errors="replace")


class LazySequence(Sequence[Item], Generic[Known, Item]):
    """Allocations or groups of them, each described only when it is asked for.

    Args:
        known: what each is described from.
    """

    def __init__(self, known: Sequence[Known]) -> None:
        self._known = known

    @abstractmethod
    def described(self, known: Known) -> Item:
        """Return the item of which this is known."""

    def __len__(self) -> int:
        return len(self._known)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self.described(known) for known in self._known[index]]
        return self.described(self._known[index])


class PeakGroups(LazySequence[int, AllocationGroup]):
    """Blocks that were allocated in the region, then all that is older as one group.

    Args:
        blocks: those that are live, and a group for each way in which others of one stack were
            freed.
        older: the last group; None if there is none.
    """

    def __init__(self, blocks: WrittenBlocks, older: AllocationGroup | None) -> None:
        super().__init__(range(len(blocks) + (older is not None)))
        self._blocks, self._older_group = blocks, older
        # At once, because stacks are forgotten when the last region ends.
        self._origins = {stack: (site_of(stack), context_of(stack)) for stack in set(blocks.stacks)}

    def described(self, known: int) -> AllocationGroup:
        if self._older_group is not None and known == len(self._blocks):
            return self._older_group
        block = self._blocks[known]
        site, context = self._origins[block.stack]
        freed = Freed(block.freed)
        return AllocationGroup(
            bytes=block.bytes,
            count=block.count,
            recorded=site,
            inside=INSIDE.get(freed),
            context=context,
            freed=freed,
            address=block.address,
        )


def older_blocks(number: int, until: int, functions: ctypes.PyDLL) -> Mapping[int, int]:
    """Return address and bytes of the live blocks that were allocated until `until`."""
    blocks = WrittenBlocks(
        functions.counter_live(), partial(functions.counter_older, number, until)
    )
    return dict(zip(blocks.addresses, blocks.sizes, strict=True))
