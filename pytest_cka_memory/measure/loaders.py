"""Wrappers of data loaders: for their consumer they look like the loader itself."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any

from pytest_cka_memory.meters.collector import not_counted
from pytest_cka_memory.units import counted

_OWN = frozenset(("_loader", "_batch_done", "_loop_done", "_running", "_count", "__class__"))


class _LoaderProxy:
    """Behaves like the loader it wraps: attributes, ``len``, indexing and ``isinstance``."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not set yet while the proxy is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def __getitem__(self, index: Any) -> Any:
        return self._loader[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._loader)

    @property  # type: ignore[misc]  # a read-only property
    def __class__(self) -> Any:
        # Consumers check isinstance(loader, DataLoader) and reject other types.
        return type(self._loader)


class SampledLoader(_LoaderProxy):
    """Calls ``batch_done(size)`` when its consumer has finished a batch and asks for the next.

    It calls ``loop_done()`` when there is no next one.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        batch_done: Callable[[int | None], None],
        loop_done: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(loader)
        self._batch_done = batch_done
        self._loop_done = loop_done
        self._running: Iterator[Any] | None = None

    def __next__(self) -> Any:
        """Return the next batch of a loader that is an iterator, as the loader itself does."""
        if self._running is None:
            if iter(self._loader) is not self._loader:
                raise TypeError(f"{type(self._loader).__name__!r} object is not an iterator")
            self._running = iter(self)
        return next(self._running)

    def __iter__(self) -> Iterator[Any]:
        return self._sampled(iter(self._loader))

    @not_counted
    def _sampled(self, batches: Iterator[Any]) -> Iterator[Any]:
        return self._each(map(_boxed, batches))

    def _each(self, boxes: Iterator[list[Any]]) -> Iterator[Any]:
        for box in boxes:
            size = size_of(box[0])
            # Popped, so that this frame does not keep the batch alive when its consumer drops it.
            yield box.pop()
            self._batch_done(size)
        self._loop_done()


class FirstBatches(_LoaderProxy):
    """The first `count` batches of a loader.

    Raises:
        ValueError: on iteration, if a loader without a length ends before `count`.
    """

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        super().__init__(loader)
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        taken = 0

        def count(batch: Any) -> Any:
            nonlocal taken
            taken += 1
            return batch

        # A loop over the batches would keep the last one alive in this frame.
        yield from map(count, islice(self._loader, self._count))
        if taken < self._count:  # an exhausted iterator or a short stream
            raise ValueError(
                f"the loader ended after {taken} of {counted(self._count, 'batch')}; pass one that "
                "can be iterated more than once and has enough batches"
            )

    def __len__(self) -> int:
        return min(self._count, super().__len__())


def _boxed(batch: Any) -> list[Any]:
    return [batch]


def size_of(batch: Any) -> int | None:
    """Return the items in a batch: the first dimension of its first tensor, its length, or None."""
    try:
        shape = getattr(batch, "shape", None)
        if shape is not None:
            return int(shape[0]) if len(shape) else None
    except (RuntimeError, TypeError, ValueError):  # a nested tensor has no shape, but a length
        return int(batch.size(0))
    if isinstance(batch, Mapping):  # Hugging Face's BatchEncoding is not a dict
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        sizes = (size_of(part) for part in batch if not isinstance(part, str))
        return next((size for size in sizes if size is not None), len(batch))
    return None


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the number of batches, or None if the loader does not know it."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader over an iterable dataset
        return None
