"""What the ledger records about one storage: where it was allocated, and its sizes."""

import weakref
from typing import NamedTuple

import torch

from pytest_cka_memory.core.allocations import (
    Allocation,
    AllocationSite,
    RawFrames,
    format_frames,
    innermost_code,
    user_frames,
)
from pytest_cka_memory.meters import torch_private

_OF_FILE = "from_file"
_OF_DATA = frozenset(("aten.lift_fresh", "aten.set_.source_Storage", _OF_FILE))
"""Operators that take a tensor or storage which no operator has made; its shape may be another."""


class OperatorSite(NamedTuple):
    """What the ledger records at an allocation; made readable only when a report needs it."""

    operator: object
    dtype: torch.dtype
    shape: tuple[int, ...]
    frames: RawFrames

    def readable(self) -> AllocationSite:
        dtype = str(self.dtype).removeprefix("torch.")
        operator = str(self.operator).removesuffix(".default")
        frames, code = format_frames(self.frames), innermost_code(self.frames)
        if operator in _OF_DATA:
            return AllocationSite(frames, code)
        return AllocationSite(frames, code, operator, dtype, self.shape)


def site_of(tensor: torch.Tensor, operator: object) -> OperatorSite:
    """Return the code that runs, for a tensor that an operator has returned to it."""
    return OperatorSite(operator, tensor.dtype, _shape_of(tensor), user_frames())


def site_of_file() -> OperatorSite:
    """Return the code that runs, for the storage of a file that it maps; it has no operator."""
    return OperatorSite(_OF_FILE, torch.uint8, (), user_frames())


class Entry(weakref.ref[torch.UntypedStorage]):
    """A storage in the ledger. Weak, because a strong reference would itself be a leak."""

    __slots__ = (
        "address",
        "excluded_bytes",
        "history",
        "is_shared",
        "key",
        "maybe_alive",
        "site",
        "size",
    )

    key: int
    site: OperatorSite | None
    size: int
    excluded_bytes: int
    """Bytes that it had when the ledger found it too late to count them; they never count."""
    history: list[tuple[int, int]]
    """(serial number, weight) of its allocation and of the changes of size since.

    Of several changes without a mark or a peak between them, only the last is here, because a
    storage may be resized any number of times.
    """
    maybe_alive: bool
    """Whether a collection freed it, or perhaps only its Python object."""
    address: int
    """Of its data, if it is a mapped file, of which tensors have parts; otherwise 0."""
    is_shared: bool
    """Whether it was in memory that processes share."""

    def is_like(self, storage: torch.UntypedStorage) -> bool:
        """Whether it may be `storage`, which has its address: not if only one of them is shared."""
        return self.size == storage.nbytes() and self.is_shared == is_shared_memory(storage)

    @property
    def weight(self) -> int:
        """How many of its bytes count now."""
        return self.history[-1][1]

    def weight_at(self, serial: int) -> int:
        """Return how many of its bytes counted at `serial`; 0 before its allocation."""
        return next((weight for when, weight in reversed(self.history) if when <= serial), 0)

    def allocation(self, size: int) -> Allocation:
        """Return `size` bytes of it as an allocation."""
        return Allocation(
            self.address or self.key,
            size,
            self.history[-1][0],
            _OneStorage(self),
            self.site,
            is_at_key=bool(self.address),
        )


class _OneStorage:
    """Knows whether one storage has been freed."""

    __slots__ = ("_reference",)

    def __init__(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self._reference = reference

    def is_live(self, key: int, serial: int) -> bool:
        return self._reference() is not None

    def is_shared(self, key: int) -> bool:
        return False


def is_shared_memory(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is in memory that processes share."""
    # On CUDA is_shared() is always true.
    return storage.device.type == "cpu" and storage.is_shared()


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's sizes; if they cannot be read, the length of its storage.

    While ``torch.jit`` traces, sizes are tensors, which would be kept alive here and become part of
    the trace. A strided nested tensor has no sizes.
    """
    if not torch_private.is_tracing():
        try:
            return tuple(tensor.shape)
        except RuntimeError:
            pass
    return (tensor.untyped_storage().nbytes() // tensor.element_size(),)
