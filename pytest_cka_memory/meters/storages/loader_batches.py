"""Distinguish batches that data loaders have yielded from those that they have received early.

Batches of worker processes arrive in shared memory, and no operator touches them. How many have
arrived before they are asked for varies by chance and would look like growth, so a batch counts
when its loader has yielded it.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.storages.live_objects import storages_in, was_freed
from pytest_cka_memory.meters.torch_private import storage_key


def may_be_prefetched(storage: torch.UntypedStorage) -> bool:
    """Whether `storage` may be part of a batch that a worker process has sent."""
    # On CUDA is_shared() is always true.
    return storage.device.type == "cpu" and storage.is_shared()


class LoaderBatches:
    """The iterators over loaders with workers that were used, and storages that wait in them."""

    def __init__(self) -> None:
        self._iterators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._waiting: list[weakref.ref[torch.UntypedStorage]] = []
        """Storages that were found, but may not have been yielded yet."""

    def add(self, iterator: object) -> None:
        """Take note of an iterator over a loader with workers."""
        self._iterators.add(iterator)

    def yielded(
        self, storages: Iterable[torch.UntypedStorage], *, collecting: bool
    ) -> Iterator[torch.UntypedStorage]:
        """Yield those of `storages`, and of those kept back earlier, that count now.

        While the garbage collector runs, a batch may be on its way from the worker to the loader's
        list of batches that wait, so with `collecting` all that may be part of one are kept back.
        """
        early = None if collecting else self._received_early()
        waiting, self._waiting = self._waiting, []
        objects = (storage for known in waiting if (storage := known()) is not None)
        kept_back = (storage for storage in objects if not was_freed(storage))
        for found in (kept_back, storages):
            for storage in found:
                if not may_be_prefetched(storage) or (
                    early is not None and storage_key(storage) not in early
                ):
                    yield storage
                else:
                    self._waiting.append(weakref.ref(storage))

    def _received_early(self) -> set[int] | None:
        """Return the keys of storages in batches that wait; None if torch hides them."""
        if torch_private.LOADER_ITERATOR is None:
            return None
        return {
            storage_key(storage)
            for iterator in list(self._iterators)
            for batch in torch_private.received_early(iterator)
            for storage in storages_in(batch)
        }
