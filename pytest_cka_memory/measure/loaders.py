"""Data loaders seen through: the same to their consumer, watched or cut short by us."""

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any

_OWN = frozenset(("_loader", "_batch_done", "_count", "__class__"))


class _LoaderProxy:
    """Passes for the loader it wraps: every attribute, ``len``, indexing and ``isinstance``."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # a copy in the making has none yet
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

    @property  # type: ignore[misc]  # no one is to set it
    def __class__(self) -> Any:
        # Consumers ask isinstance(loader, DataLoader) and would refuse anything else.
        return type(self._loader)


class SampledLoader(_LoaderProxy):
    """Calls ``batch_done(size)`` each time its consumer asks for the batch after one."""

    def __init__(self, loader: Iterable[Any], batch_done: Callable[[int | None], None]) -> None:
        super().__init__(loader)
        self._batch_done = batch_done

    def __iter__(self) -> Iterator[Any]:
        for box in map(_boxed, self._loader):
            size = size_of(box[0])
            # Popped, so that this frame holds no batch its consumer has let go.
            yield box.pop()
            self._batch_done(size)


class FirstBatches(_LoaderProxy):
    """The first `count` batches of a loader.

    Raises:
        ValueError: on iteration, where a loader that does not know its length ends before.
    """

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        super().__init__(loader)
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        taken = 0

        def counted(batch: Any) -> Any:
            nonlocal taken
            taken += 1
            return batch

        yield from map(counted, islice(self._loader, self._count))
        if taken < self._count:  # an iterator used up before, or a short stream
            raise ValueError(
                f"the loader ended after {taken} of {self._count} batches; give one that can be "
                "iterated anew each time and has enough data"
            )

    def __len__(self) -> int:
        return min(self._count, super().__len__())


def _boxed(batch: Any) -> list[Any]:
    return [batch]


def size_of(batch: Any) -> int | None:
    """Items in a batch: the first dimension of its first tensor, else its length, else None."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        sizes = (size_of(part) for part in batch if not isinstance(part, str))
        return next((size for size in sizes if size is not None), len(batch))
    return None


def length_of(loader: Iterable[Any]) -> int | None:
    """Number of batches, where the loader knows it."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader over an iterable dataset
        return None
