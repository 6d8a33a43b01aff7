"""Values that were never computed: the first read of one raises.

A storage is stale if an operator that is not computed has written it, or if a kernel that no
operator launched (one of Triton or of the user) may have written it. Results that are computed from
stale values are stale as well. Copying to a tensor and filling it make it fresh again.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from emulated_cuda import torch_private
from emulated_cuda.errors import WITHOUT_VALUES, StaleValueError
from emulated_cuda.values import operators
from emulated_cuda.values.operators import tensors_in


@dataclass(frozen=True)
class _Stale:
    """A storage whose values are not known."""

    ref: StorageWeakRef
    reason: str
    start: int
    end: int


_lock = threading.Lock()
_stale: dict[int, _Stale] = {}
"""Address of the storage in C++ -> why its values are not known."""
_fresh: set[int] = set()
"""After unknown work: addresses that were written since, or have been allocated again."""
_reachable: set[int] = set()
"""After unknown work: addresses of the blocks that were in use then; empty if not known."""
_known_work = 0
_ignoring = 0
"""How many operators run whose results are known, whatever kernels they launch."""
_unknown: str | None = None
"""Why storages outside `_fresh` have unknown values; None if no unknown kernel has run."""


def is_possible() -> bool:
    """Whether any value may be stale. It is fast, because every operator calls it."""
    if _has_new_work():
        _note_new_work()
    return bool(_stale) or _unknown is not None


def _has_new_work() -> bool:
    return _ignoring == 0 and operators.library().unknown_work.value != _known_work


def forget() -> None:
    """Treat every value as computed from now on."""
    global _known_work, _unknown
    with _lock:
        _stale.clear()
        _fresh.clear()
        _reachable.clear()
        _unknown = None
        _known_work = operators.library().unknown_work.value


@contextlib.contextmanager
def ignored_work() -> Iterator[None]:
    """Ignore kernels that run in this context: their operator's result is written afterwards."""
    global _ignoring, _known_work
    is_possible()  # notes unknown kernels that ran before this context: those are not ignored
    _ignoring += 1
    try:
        yield
    finally:
        _ignoring -= 1
        if _ignoring == 0:
            _known_work = operators.library().unknown_work.value


def mark(values: Any, reason: str) -> None:
    """Note that these tensors were not computed."""
    with _lock:
        _mark(values, reason)


def _mark(values: Any, reason: str) -> None:
    for tensor in tensors_in(values):
        if tensor.is_cuda:
            for storage in _storages(tensor):
                ref, start = StorageWeakRef(storage), storage.data_ptr()
                _stale[ref.cdata] = _Stale(ref, reason, start, start + storage.nbytes())


def propagate(
    inputs: Any, outputs: Any, *, arguments: Any = None, overwrites: bool = False
) -> None:
    """Note results as stale if they were computed from stale values, otherwise as fresh.

    Args:
        inputs: what the operator has read.
        outputs: what it has written.
        arguments: all arguments of the operator; an output with another storage is new, and fresh
            as a whole. By default no output is new.
        overwrites: whether every element of the outputs was written, whatever they were before.
    """
    is_possible()
    reason = None
    written = {tensor.data_ptr() for tensor in tensors_in(outputs)} if overwrites else set()
    for tensor in tensors_in(inputs):
        if tensor.is_cuda and not (overwrites and tensor.data_ptr() in written):
            reason = reason or reason_of(tensor)
    if reason is not None:
        mark(outputs, reason)
        return
    old = None if arguments is None else {key for t in tensors_in(arguments) for key in _keys(t)}
    with _lock:
        _note_written(outputs, old)


def _note_written(outputs: Any, old: set[int] | None) -> None:
    for tensor in tensors_in(outputs):
        for storage in _storages(tensor) if tensor.is_cuda else ():
            ref = StorageWeakRef(storage)
            is_new = old is not None and ref.cdata not in old
            whole = tensor.numel() * tensor.element_size() == storage.nbytes()
            known = _reason_of_storage(ref, storage.data_ptr()) is None
            if is_new or whole or known:
                _forget(ref, storage)
                if _unknown is not None:
                    _fresh.add(storage.data_ptr())


def check(values: Any) -> None:
    """Raise if one of these tensors was not computed.

    Raises:
        StaleValueError: names what should have written it.
    """
    is_possible()
    for tensor in tensors_in(values):
        if tensor.is_cuda and tensor.numel():
            reason = reason_of(tensor)
            if reason is not None:
                raise StaleValueError(reason)


def reason_of(tensor: torch.Tensor) -> str | None:
    """Return why a tensor's values are not known; None if they are."""
    for storage in _storages(tensor):
        with _lock:
            reason = _reason_of_storage(StorageWeakRef(storage), storage.data_ptr())
        if reason is not None:
            return reason
    return None


def _reason_of_storage(ref: StorageWeakRef, address: int) -> str | None:
    # Another storage may have the same memory, as those that DLPack and torch.save make have.
    for key, stale in list(_stale.items()):
        if stale.ref.expired():
            del _stale[key]
        elif key == ref.cdata or stale.start <= address < stale.end:
            return stale.reason
    if address in _fresh or (_reachable and address not in _reachable):
        return None
    return _unknown


def reason_of_bytes(start: int, size: int) -> str | None:
    """Return why bytes of device memory are not known; None if they are."""
    with _lock:
        for key, stale in list(_stale.items()):
            if stale.ref.expired():
                del _stale[key]
            elif stale.start < start + size and start < stale.end:
                return stale.reason
        if _unknown is None:
            return None
        block = _block_of(start)[0]
        is_known = block in _fresh or (_reachable and block not in _reachable)
        return None if is_known else _unknown


def note_received(start: int, size: int) -> None:
    """Note storages in these bytes of device memory as fresh."""
    with _lock:
        for key, stale in list(_stale.items()):
            if start <= stale.start and stale.end <= start + size:
                del _stale[key]
        if _unknown is not None and _block_of(start) <= (start, size):
            _fresh.add(start)


def _segments() -> list[dict[str, Any]]:
    try:
        segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()
        return segments
    finally:
        # torch 2.14 gives back a reference to True that it was not given, which Python counts up
        # to 3.11: it would end the process after some 12,000 calls.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(True))


def _block_of(address: int) -> tuple[int, int]:
    """Return address and requested size of the allocator's block in which an address lies."""
    return max(
        (block["address"], block["requested_size"])
        for segment in _segments()
        for block in segment["blocks"]
        if block["address"] <= address
    )


def _forget(ref: StorageWeakRef, storage: torch.UntypedStorage) -> None:
    """Treat a storage, and others with the same memory, as computed."""
    start = storage.data_ptr()
    _stale.pop(ref.cdata, None)
    for key, stale in list(_stale.items()):
        if start <= stale.start and stale.end <= start + storage.nbytes():
            del _stale[key]


def _note_new_work() -> None:
    global _known_work, _unknown
    with _lock:
        _known_work = operators.library().unknown_work.value
        name = operators.library().unknown_name()
        _fresh.clear()
        _reachable.clear()
        _reachable.update(_blocks_in_use())
        _unknown = (
            f"the emulated device did not compute the kernel {name}, because it was launched "
            "outside of torch's operators. The values that the kernel should have written are not "
            "known; call operators of torch instead, write the kernel in Triton, or use a GPU. To "
            f"measure memory only, {WITHOUT_VALUES}"
        )


def _blocks_in_use() -> list[int]:
    """Return the addresses of all blocks in use; none if this allocator does not list them."""
    if torch.cuda.get_allocator_backend() != "native":
        return []
    return [
        block["address"]
        for segment in _segments()
        for block in segment["blocks"]
        if block["state"].startswith("active")
    ]


def _keys(tensor: torch.Tensor) -> list[int]:
    storages = _storages(tensor) if tensor.is_cuda else []
    return [StorageWeakRef(storage).cdata for storage in storages]


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [part.untyped_storage() for part in torch_private.sparse_parts(tensor)]
    parts = (*torch_private.compressed_parts(tensor), tensor.values())
    return [part.untyped_storage() for part in parts]


_ASKED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
)
_kept: list[Any] = []


def answer_nccl(path: str) -> None:
    """Have the library ask whether values are known before it sends them to other ranks.

    NCCL moves the bytes itself. What a rank receives is known, because no rank sends a value that
    was not computed.

    Args:
        path: of the library of the emulated device, which is loaded.
    """
    asked = _ASKED(_asked)
    _kept.append(asked)
    ctypes.PyDLL(path).emulated_ask_before_sending(asked)


def _asked(start: int, size: int, receives: int, text: int, room: int) -> int:
    """Return 1 and write why, if these bytes are sent and not known; note what is received."""
    if not is_possible():
        return 0
    if receives:
        note_received(start, size)
        return 0
    reason = reason_of_bytes(start, size)
    if reason is None:
        return 0
    encoded = reason.encode()[: room - 1] + b"\0"
    ctypes.memmove(text, encoded, len(encoded))
    return 1
