"""Data loaders in step: pairs of batches, a small last one merged, padding left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch.utils.data import DistributedSampler

from cka.data.batches import first_samples, joined, samples_in
from cka.errors import InputError

Pair: TypeAlias = tuple[Any, ...]
"""One batch per data loader: one or two."""


def batches(loaders: tuple[Iterable[Any], ...], fewest: int) -> Iterator[Pair]:
    """Yield the loaders' batches in step, so that as few as possible have under ``fewest`` samples.

    Raises:
        InputError: if two loaders disagree on the number of batches, or of samples in one.
    """
    return _merged(_in_step([_unpadded(loader) for loader in loaders]), loaders, fewest)


def length(loader: Iterable[Any]) -> int | None:
    """Number of batches, where the loader tells."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def dataset_size(loader: Iterable[Any]) -> int | None:
    """Number of samples this process will see, where the loader tells as a DataLoader does."""
    own = _own_samples(loader)
    if own is not None:
        return own
    try:
        return len(loader.sampler)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _own_samples(loader: Iterable[Any]) -> int | None:
    """Samples of this rank without the padding of a DistributedSampler; None: nothing is padded.

    The sampler repeats its first samples until every rank has the same number. Rank r takes
    positions r, r + world, r + 2 world, …, so that exactly those below len(dataset) are its own.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    total = len(sampler.dataset)  # type: ignore[arg-type]
    return max(0, -(-(total - sampler.rank) // sampler.num_replicas))


def _unpadded(loader: Iterable[Any]) -> Iterator[Any]:
    left = _own_samples(loader)
    if left is None:
        yield from loader
        return
    for batch in loader:
        size = samples_in(batch) or 0
        if size > left:
            batch = first_samples(batch, left)
        if left > 0:
            yield batch
        left -= min(size, left)


def _in_step(loaders: list[Iterator[Any]]) -> Iterator[Pair]:
    if len(loaders) == 1:
        for batch in loaders[0]:
            yield (batch,)
        return
    first, second = loaders
    number = 0
    for batch in first:
        try:
            other = next(second)
        except StopIteration:
            raise InputError(_uneven(number, "dataloader2")) from None
        if samples_in(batch) != samples_in(other):
            raise InputError(
                f"batch {number} has {samples_in(batch)} samples in dataloader and "
                f"{samples_in(other)} in dataloader2; both must give the same samples in the same "
                "order and batch size"
            )
        yield batch, other
        number += 1
    if next(second, None) is not None:
        raise InputError(_uneven(number, "dataloader"))


def _uneven(batches: int, shorter: str) -> str:
    return (
        f"{shorter} ended after {batches} batches and the other one goes on; both must give the "
        "same samples in the same order and batch size"
    )


def _merged(
    pairs: Iterator[Pair], loaders: tuple[Iterable[Any], ...], fewest: int
) -> Iterator[Pair]:
    """Join a batch that is too small to the one before it, where that one was held back."""
    waiting: Pair | None = None
    for index, pair in enumerate(pairs):
        if waiting is not None:
            together = _together(waiting, pair) if _too_small(pair, fewest) else None
            if together is not None:
                waiting = together
                continue
            yield waiting
            waiting = None
        if any(_held_back(loader, index, fewest) for loader in loaders):
            waiting = pair
        else:
            yield pair
    if waiting is not None:
        yield waiting


def _held_back(loader: Iterable[Any], index: int, fewest: int) -> bool:
    """Whether to look at the next batch before batch ``index`` is used.

    It costs the memory of one more batch, so it is done only where it costs nothing (a list holds
    its batches anyway) and right before a last batch that is known to be too small.
    """
    if isinstance(loader, (list, tuple)):
        return True
    # By its attributes, not its class: a wrapper around a DataLoader will do.
    samples = dataset_size(loader)
    size = getattr(loader, "batch_size", None)
    if samples is None or not isinstance(size, int) or getattr(loader, "drop_last", False):
        return False
    return 0 < samples % size < fewest and index == samples // size - 1


def _too_small(pair: Pair, fewest: int) -> bool:
    size = samples_in(pair[0])
    return size is not None and size < fewest


def _together(pair: Pair, small: Pair) -> Pair | None:
    try:
        return tuple(map(joined, pair, small))
    except ValueError:
        return None
