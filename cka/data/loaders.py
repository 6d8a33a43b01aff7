"""Iterate over one or two data loaders together.

Padding samples are dropped, and a small last batch is concatenated with the batch before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from torch.utils.data import DistributedSampler

from cka.data.batches import concatenate_batches, first_samples, samples_in
from cka.errors import InputError

BatchTuple: TypeAlias = tuple[Any, ...]
"""One batch of each data loader: one or two."""


def batch_tuples(loaders: tuple[Iterable[Any], ...], min_samples: int) -> Iterator[BatchTuple]:
    """Yield one batch of each loader at a time, with as few batches as possible too small.

    A batch with fewer than ``min_samples`` samples is concatenated with the batch before it if
    that batch is still available.

    Raises:
        InputError: if two loaders yield different numbers of batches, or of samples in a batch.
    """
    together = _zip_checked([_without_padding(loader) for loader in loaders])
    return _concatenate_small(together, loaders, min_samples)


def batch_count(loader: Iterable[Any]) -> int | None:
    """Return the number of batches, or None if the loader has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def sample_count(loader: Iterable[Any]) -> int | None:
    """Return the number of samples that this process will get, or None if it is not known.

    It is known for a DataLoader, and for an object with a ``sampler`` that has a length.
    """
    own = _samples_of_rank(loader)
    if own is not None:
        return own
    try:
        return len(loader.sampler)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _samples_of_rank(loader: Iterable[Any]) -> int | None:
    """Return this rank's number of samples without the padding of a DistributedSampler.

    The sampler repeats its first samples until every rank has the same number. Rank r takes
    positions r, r + world, r + 2 world, …, so exactly those below len(dataset) are not repeated.
    Returns None if nothing is padded.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    total = len(sampler.dataset)  # type: ignore[arg-type]
    return max(0, -(-(total - sampler.rank) // sampler.num_replicas))


def _without_padding(loader: Iterable[Any]) -> Iterator[Any]:
    left = _samples_of_rank(loader)
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


def _zip_checked(loaders: list[Iterator[Any]]) -> Iterator[BatchTuple]:
    """Yield one batch of each loader at a time; check that they agree in number and size."""
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
            raise InputError(_ended_early("dataloader2", number)) from None
        if samples_in(batch) != samples_in(other):
            raise InputError(
                f"batch {number} has {samples_in(batch)} samples in dataloader and "
                f"{samples_in(other)} in dataloader2; pass loaders with the same samples in the "
                "same order and batch size"
            )
        yield batch, other
        number += 1
    if next(second, None) is not None:
        raise InputError(_ended_early("dataloader", number))


def _ended_early(shorter: str, batches: int) -> str:
    return (
        f"{shorter} ended after {batches} batches, but the other loader has more; pass loaders "
        "with the same samples in the same order and batch size"
    )


def _concatenate_small(
    batches: Iterator[BatchTuple], loaders: tuple[Iterable[Any], ...], min_samples: int
) -> Iterator[BatchTuple]:
    """Concatenate a batch that is too small with the one before it, if that one was delayed."""
    delayed: BatchTuple | None = None
    for index, current in enumerate(batches):
        if delayed is not None:
            both = _concatenated(delayed, current) if _too_small(current, min_samples) else None
            if both is not None:
                delayed = both
                continue
            yield delayed
            delayed = None
        if any(_must_delay(loader, index, min_samples) for loader in loaders):
            delayed = current
        else:
            yield current
    if delayed is not None:
        yield delayed


def _must_delay(loader: Iterable[Any], index: int, min_samples: int) -> bool:
    """Whether batch ``index`` is used only after the next batch has been fetched.

    Two batches take more memory than one. A batch is therefore delayed only if the loader is a
    list, which holds its batches anyway, or if the next batch is known to be the last and small.
    """
    if isinstance(loader, (list, tuple)):
        return True
    # The attributes are checked, not the class, so that wrappers of a DataLoader work too.
    samples = sample_count(loader)
    size = getattr(loader, "batch_size", None)
    if samples is None or not isinstance(size, int) or getattr(loader, "drop_last", False):
        return False
    return 0 < samples % size < min_samples and index == samples // size - 1


def _too_small(batches: BatchTuple, min_samples: int) -> bool:
    size = samples_in(batches[0])
    return size is not None and size < min_samples


def _concatenated(batches: BatchTuple, small: BatchTuple) -> BatchTuple | None:
    try:
        return tuple(map(concatenate_batches, batches, small))
    except ValueError:
        return None
