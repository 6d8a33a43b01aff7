"""Batches: the loaders they come from, and what a model gets of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler

from cka.capture.outputs import map_named, named_tensors, shapes_of
from cka.errors import InputError
from cka.samples import SampleRule


def model_input(batch: Any) -> Any:
    """Return the part of a batch that is the model's input.

    This is the first element of a tuple or list, as in ``(images, labels)``, the first field of a
    dataclass, and a whole tensor or mapping.

    Raises:
        InputError: if the batch is an empty tuple or list.
    """
    if isinstance(batch, (list, tuple)):
        if not batch:
            raise InputError(
                f"the loader yielded an empty batch, {batch!r}; yield a tensor, (inputs, ...) or "
                "a dict"
            )
        _check_not_samples(batch)
        return model_input(batch[0])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return model_input(getattr(batch, dataclasses.fields(batch)[0].name))
    return batch


# A pair or a triple may be inputs and labels, but not more tensors that are all alike.
_MOST_PARTS = 3


def _check_not_samples(batch: Any) -> None:
    """Refuse a list of samples, of which only the first would reach the model."""
    tensors = [part for part in batch if isinstance(part, Tensor)]
    alike = {(part.ndim, part.dtype) for part in tensors}
    if len(tensors) != len(batch) or len(alike) > 1 or tensors[0].ndim < 2:
        return
    different = len({part.shape for part in tensors}) > 1 and len({len(p) for p in tensors}) > 1
    if len(batch) > _MOST_PARTS or different:
        named = {f"[{at}]": part for at, part in enumerate(tensors)}
        raise InputError(
            f"a batch is a {type(batch).__name__} of {len(batch)} tensors "
            f"({shapes_of(named, 3)}), of which the model would get only the first. If each "
            "tensor is a sample, pass feed=lambda model, batch: model(batch) and samples=len; if "
            "each tensor is an input of the model, pass feed=lambda model, batch: model(*batch)"
        )


def run_model(model: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> Any:
    """Call the model with a mapping as keyword arguments, or with anything else as one argument.

    Args:
        model: the model.
        inputs: its input.
        keywords: keyword arguments that are added to an input that is not a mapping.
    """
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs, **keywords)


def reason_of_failure(model: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> str | None:
    """Return why a model raised for its inputs, and what to write; None if it is not known.

    Args:
        model: the model.
        inputs: its input.
        keywords: further keyword arguments.
    """
    args, named = ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), keywords)
    for name, value in ({"": inputs} if args else dict(named)).items():
        if not isinstance(value, (Tensor, bool, int, float, str, type(None))) and hasattr(
            value, "__array__"
        ):
            return (
                f"its input {name or ''} is a {type(value).__module__}.{type(value).__name__}, not "
                "a tensor; yield torch.from_numpy(array), or load through a DataLoader"
            ).replace("  ", " ")
    try:
        inspect.signature(model.forward).bind(*args, **named)
    except TypeError as error:
        write = "feed=lambda model, batch: model(...) to call it with the right arguments"
        if not args:
            write += ", or remove the entries that the model does not accept from the batch"
        inputs_text = f"a dict of {', '.join(map(str, named))}" if not args else _kind(inputs)
        return f"its forward is called with {inputs_text}, but {error}; pass {write}"
    except ValueError:  # a function without a signature
        pass
    weights = {each.dtype for each in model.parameters() if each.is_floating_point()}
    floats = {
        name: tensor.dtype
        for name, tensor in named_tensors(inputs)
        if tensor.is_floating_point() and weights and tensor.dtype not in weights
    }
    if floats:
        shown = ", ".join(f"{name or 'its input'}: {dtype}" for name, dtype in floats.items())
        return (
            f"its weights are {' and '.join(sorted(map(str, weights)))}, but the batch has "
            f"another dtype ({shown}); pass cast_inputs=True, or cast_inputs='name' to cast one "
            "entry, or convert the batch in the loader"
        )
    return None


def _kind(inputs: Any) -> str:
    shape = f" {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else ""
    return f"one {type(inputs).__name__}{shape}"


def to_device(
    batch: Any,
    device: torch.device,
    dtype: torch.dtype | None = None,
    names: Collection[str] | None = None,
) -> Any:
    """Return a batch on a device, of the same structure.

    Args:
        batch: a batch of any structure; tensors that are already there are not copied.
        device: where its tensors go.
        dtype: the dtype to which floating-point tensors are converted; None keeps theirs.
        names: which entries are converted; None means all.
    """
    # The CPU would not wait for an asynchronous copy to host memory before reading it.
    non_blocking = device.type != "cpu"

    def move(name: str, tensor: Tensor) -> Tensor:
        cast = tensor.is_floating_point() and (names is None or name.rpartition(".")[2] in names)
        return tensor.to(device=device, dtype=dtype if cast else None, non_blocking=non_blocking)

    return map_named(batch, move)


def concatenate_batches(first: Any, second: Any, rule: SampleRule | None = None) -> Any:
    """Return one batch with the n1 + n2 samples of both.

    Args:
        first: a batch of n1 samples.
        second: a batch of n2 samples, of the same structure.
        rule: which axis of their tensors has the samples; None means axis 0.

    Raises:
        InputError: if the batches differ in structure, or their samples in shape.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        axis = (rule or SampleRule()).axis_of("", first)
        shapes = [[*part.shape] for part in (first, second)]
        rest = [[size for at, size in enumerate(shape) if at != axis] for shape in shapes]
        if axis is None or rest[0] != rest[1]:
            raise InputError(
                f"cannot concatenate tensors of shape {tuple(first.shape)} and "
                f"{tuple(second.shape)}; they may differ only in the number of samples"
            )
        return torch.cat([first, second], axis)
    if isinstance(first, Mapping) and isinstance(second, Mapping) and set(first) == set(second):
        return {key: concatenate_batches(first[key], second[key], rule) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields") and type(first) is type(second):
        pairs = zip(first, second, strict=True)
        return type(first)(*(concatenate_batches(a, b, rule) for a, b in pairs))
    if isinstance(first, (list, tuple)) and type(first) is type(second):
        # Sequences with tensors or further sequences are structures; others are lists of samples.
        if any(isinstance(part, (Tensor, Mapping, list, tuple)) for part in (*first, *second)):
            pairs = zip(first, second, strict=True)
            return type(first)(concatenate_batches(a, b, rule) for a, b in pairs)
        return type(first)([*first, *second])  # one entry per sample, such as a list of texts
    raise InputError(
        f"cannot concatenate batches of type {type(first).__name__} and {type(second).__name__}; "
        "both must be tensors, or the same kind of mapping or sequence"
    )


BatchTuple: TypeAlias = tuple[Any, ...]
"""One batch of each data loader: one or two."""


@dataclasses.dataclass(frozen=True)
class Counting:
    """How the samples of a batch are counted."""

    rule: SampleRule
    """Which axis has the samples."""
    of_feed: bool = False
    """Whether a user's ``feed`` gets the whole batch, whose structure is then not known."""

    def count(self, batch: Any) -> int | None:
        """Return the number of samples in a batch of a loader; None if the batch shows none.

        Args:
            batch: what the loader yields.
        """
        if self.of_feed or self.rule.is_set:
            return self.rule.count(batch, of_feed=self.of_feed)
        return self.rule.count(model_input(batch), of_feed=False)


def batch_tuples(
    loaders: tuple[Iterable[Any], ...], min_samples: int, counting: Counting
) -> Iterator[BatchTuple]:
    """Yield one batch of each loader at a time; join a batch that is too small to another.

    A batch with fewer than ``min_samples`` samples is concatenated with the batch before it if
    that batch is still available.

    Args:
        loaders: one loader, or two with the same samples.
        min_samples: smallest number of samples that the estimator can use.
        counting: says how many samples a batch has.

    Raises:
        InputError: if two loaders yield different numbers of batches, or of samples in a batch.
    """
    together = _zip_checked([_without_padding(loader, counting) for loader in loaders], counting)
    return _concatenate_small(together, loaders, min_samples, counting)


def check_loader(loader: Any, name: str) -> None:
    """Check that a loader yields batches.

    Args:
        loader: what the user passed.
        name: its name in the message of an error.

    Raises:
        InputError: if it yields single samples, or cannot be iterated.
    """
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise InputError(
            f"{name} is a {type(loader).__name__}, which yields single samples; "
            "write torch.utils.data.DataLoader(dataset, batch_size=64)"
        )
    if isinstance(loader, Tensor) and loader.ndim < 3 and loader.is_floating_point():
        raise InputError(
            f"{name} is one tensor {tuple(loader.shape)}, so each of its rows would be a batch; "
            "write [tensor] if it is one batch, or tensor.split(64) for batches of 64 rows"
        )
    if isinstance(loader, (Mapping, str)) or not hasattr(loader, "__iter__"):
        raise InputError(
            f"{name} is a {type(loader).__name__}, which yields no batches; pass a DataLoader, or "
            "a list of batches, e.g. [batch]"
        )


def shuffles(loader: Any) -> bool:
    """Whether a loader has an order of its own each time, from torch's global random state.

    Args:
        loader: what the user passed.
    """
    sampler = getattr(loader, "sampler", None)
    return isinstance(sampler, RandomSampler) and sampler.generator is None


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


def _without_padding(loader: Iterable[Any], counting: Counting) -> Iterator[Any]:
    left = _samples_of_rank(loader)
    if left is None:
        yield from loader
        return
    for batch in loader:
        size = counting.count(batch) or 0
        # The last batches of a rank may contain samples that the sampler repeated as padding.
        if size > left:
            batch = counting.rule.first(batch, left, size)
        if left > 0:
            yield batch
        left -= min(size, left)


def _zip_checked(loaders: list[Iterator[Any]], counting: Counting) -> Iterator[BatchTuple]:
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
        sizes = counting.count(batch), counting.count(other)
        if None not in sizes and sizes[0] != sizes[1]:
            raise InputError(
                f"batch {number} has {sizes[0]} samples in dataloader and "
                f"{sizes[1]} in dataloader2; pass loaders with the same samples in the "
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
    batches: Iterator[BatchTuple],
    loaders: tuple[Iterable[Any], ...],
    min_samples: int,
    counting: Counting,
) -> Iterator[BatchTuple]:
    """Concatenate a batch that is too small with the one before it, if that one was delayed."""
    delayed: BatchTuple | None = None
    for index, current in enumerate(batches):
        if delayed is not None:
            small = _too_small(current, min_samples, counting)
            both = _concatenated(delayed, current, counting) if small else None
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


def _too_small(batches: BatchTuple, min_samples: int, counting: Counting) -> bool:
    size = counting.count(batches[0])
    return size is not None and size < min_samples


def _concatenated(batches: BatchTuple, small: BatchTuple, counting: Counting) -> BatchTuple | None:
    """Return joined batches, or None if it is not certain that each tensor has the samples."""
    for batch in (*batches, *small):
        size = counting.count(batch)
        if size is None or not counting.rule.agrees(batch, size):
            return None
    try:
        return tuple(
            concatenate_batches(batch, other, counting.rule)
            for batch, other in zip(batches, small, strict=True)
        )
    except ValueError:  # another structure: the small batch is then left out, with a warning
        return None
