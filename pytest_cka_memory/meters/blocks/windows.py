"""Storages on memory that other libraries lend, while they are live. They may overlap.

The library in C counts each byte once, see ``csrc/lent.c``. It is told when a storage is freed,
because torch reports that only for memory of its own.
"""

import weakref

import torch

from pytest_cka_memory.meters.blocks.counter import prepared_functions

_CPU = torch.device("cpu")


class _Window(weakref.ref[torch.UntypedStorage]):
    """The range of memory that a storage uses."""

    __slots__ = ("address", "identity", "size")

    address: int
    size: int
    identity: int
    """The storage's."""


_windows: dict[int, _Window] = {}
"""By the identity of the storage: one for the process, which has one counter of the CPU."""


def add(storage: torch.UntypedStorage, *, is_new: bool) -> None:
    """Count the memory of a storage until it is freed, unless it is of torch's own allocator."""
    # A fake tensor's storage is on another device and has no address.
    if id(storage) in _windows or storage.device != _CPU:
        return
    address, size = storage.data_ptr(), storage.nbytes()
    if not address or not size:
        return
    window = _Window(storage, _remove)
    window.address, window.size, window.identity = address, size, id(storage)
    _windows[id(storage)] = window
    if not prepared_functions().lent_add(address, size, is_new):
        del _windows[id(storage)]


def has(storage: torch.UntypedStorage) -> bool:
    """Whether the memory of a storage was lent."""
    return id(storage) in _windows


def remove(storage: torch.UntypedStorage) -> None:
    """Count what no other storage uses as freed; do nothing if the memory was not lent."""
    window = _windows.get(id(storage))
    if window is not None:
        _remove(window)


def _remove(window: _Window) -> None:
    if _windows.get(window.identity) is window:
        del _windows[window.identity]
        prepared_functions().lent_remove(window.address, window.size)
