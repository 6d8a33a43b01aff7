"""Batches: the loaders they come from, what a model gets of them, and their masks of padding.

Of the names of masks, ``attention_mask`` and ``decoder_attention_mask`` are those of Hugging Face's
models: 1 is a token, 0 is padding. ``src_key_padding_mask`` and ``tgt_key_padding_mask`` are those
of ``torch.nn.Transformer``, in which True is padding.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from cka.capture.outputs import BatchMasks, TokenMask, tensors_in
from cka.errors import InputError, SettingError


def samples_in(batch: Any) -> int | None:
    """Return the first dimension of the batch's first tensor; None if there is no tensor."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), None)


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
                f"got an empty batch, {batch!r}; yield a tensor, (inputs, ...) or a dict"
            )
        return model_input(batch[0])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return model_input(getattr(batch, dataclasses.fields(batch)[0].name))
    return batch


def run_model(model: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> Any:
    """Call the model with a mapping as keyword arguments, or with anything else as one argument.

    Args:
        model: the model.
        inputs: its input.
        keywords: keyword arguments that are added to an input that is not a mapping.
    """
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs, **keywords)


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return a batch on a device, of the same structure.

    Args:
        batch: a batch of any structure; tensors that are already there are not copied.
        device: where its tensors go.
        dtype: the dtype to which its floating-point tensors are converted; None keeps theirs.
    """
    # The CPU would not wait for an asynchronous copy to host memory before reading it.
    non_blocking = device.type != "cpu"

    def move(tensor: Tensor) -> Tensor:
        wanted = dtype if tensor.is_floating_point() else None
        return tensor.to(device=device, dtype=wanted, non_blocking=non_blocking)

    return map_tensors(batch, move)


def first_samples(batch: Any, count: int) -> Any:
    """Return the first samples of a batch: views, in the same structure.

    Args:
        batch: a batch of any structure; 0-d tensors are kept.
        count: number of samples.
    """
    return map_tensors(batch, lambda tensor: tensor[:count] if tensor.ndim else tensor)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nested structure with ``change`` applied to every tensor.

    Mappings become plain dicts. Objects of other types are returned unchanged, even if they have
    a method ``.to``: they need ``CKA(feed=...)``.

    Args:
        value: tensors in mappings, sequences and dataclasses.
        change: a function of a tensor.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(part, change) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field in dataclasses.fields(value):
            # object.__setattr__ also works on the copy of a frozen dataclass.
            object.__setattr__(changed, field.name, map_tensors(getattr(value, field.name), change))
        return changed
    return value


def concatenate_batches(first: Any, second: Any) -> Any:
    """Return one batch with the n1 + n2 samples of both.

    Args:
        first: a batch of n1 samples.
        second: a batch of n2 samples, of the same structure.

    Raises:
        InputError: if the batches differ in structure, or their samples in shape.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.ndim == 0 or first.shape[1:] != second.shape[1:]:
            raise InputError(
                f"cannot concatenate tensors of shape {tuple(first.shape)} and "
                f"{tuple(second.shape)}; only their first dimension may differ"
            )
        return torch.cat([first, second])
    if isinstance(first, Mapping) and isinstance(second, Mapping) and set(first) == set(second):
        return {key: concatenate_batches(first[key], second[key]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields") and type(first) is type(second):
        return type(first)(*map(concatenate_batches, first, second))
    if isinstance(first, (list, tuple)) and type(first) is type(second):
        # Sequences with tensors or further sequences are structures; others are lists of samples.
        if any(isinstance(part, (Tensor, Mapping, list, tuple)) for part in (*first, *second)):
            pairs = zip(first, second, strict=True)
            return type(first)(concatenate_batches(a, b) for a, b in pairs)
        return type(first)([*first, *second])  # one entry per sample, such as a list of texts
    raise InputError(
        f"cannot concatenate batches of type {type(first).__name__} and {type(second).__name__}; "
        "both must be tensors, or the same kind of mapping or sequence"
    )


Mask: TypeAlias = str | Callable[[Any], Any] | None
"""A name in the batch, a function of the batch, ``"auto"``, or None for no mask."""

_NAMES = ("attention_mask", "src_key_padding_mask")
_DECODER_NAMES = ("decoder_attention_mask", "tgt_key_padding_mask")
_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "tgt", *_DECODER_NAMES)
_WRITE = (
    "write mask=lambda batch: a (samples, tokens) tensor that is 1 for tokens and 0 for padding, "
    "or mask=None to use every position"
)


def check_masks(mask: Any) -> tuple[Mask, Mask]:
    """Return the masks of both models: one for both, or a pair.

    Args:
        mask: what the user passed: a name, a function, None, or a pair of these.

    Raises:
        SettingError: if a mask is neither a name, a function nor None.
    """
    masks = tuple(mask) if isinstance(mask, (list, tuple)) else (mask, mask)
    if len(masks) != 2 or not all(m is None or isinstance(m, str) or callable(m) for m in masks):
        raise SettingError(
            f"cannot use {mask!r} as a mask; write the name of a batch's entry, a function of the "
            "batch, None, or a pair of these, one for each model"
        )
    return masks[0], masks[1]


def find_masks(batch: Any, mask: Mask, model: nn.Module, samples: int | None) -> BatchMasks:
    """Return the masks of a batch for one model.

    Args:
        batch: a batch of the loader, before a part of it is passed to the model.
        mask: the model's mask, from :func:`check_masks`.
        model: the model; its ``config`` says whether it has encoder and decoder.
        samples: number of samples in the batch; None if the batch does not show it.

    Raises:
        InputError: if the batch has no entry of the name ``mask``.
    """
    if mask is None:
        return BatchMasks()
    config = getattr(model, "config", None)
    has_decoder = getattr(config, "is_encoder_decoder", False) is True or any(
        entry(batch, name) is not None for name in _DECODER_INPUTS
    )
    return BatchMasks(
        tokens=_token_mask(batch, mask, samples),
        decoder_tokens=_first_named(batch, _DECODER_NAMES, samples),
        has_decoder=has_decoder,
    )


def mask_keywords(batch: Any, model: nn.Module) -> dict[str, Any]:
    """Return the masks that a batch has as attributes and the model takes as keyword arguments.

    The model gets only the first field of a dataclass. Without its mask, it would read padding.
    """
    entries = ((name, entry(batch, name)) for name in (*_NAMES, *_DECODER_NAMES))
    masks = {name: value for name, value in entries if isinstance(value, Tensor)}
    try:
        parameters = inspect.signature(model.forward).parameters if masks else {}
    except (TypeError, ValueError):  # a function without a signature
        return {}
    return {name: value for name, value in masks.items() if name in parameters}


def entry(batch: Any, name: str) -> Any:
    """Return an entry of a mapping, or an attribute of another object; None if there is none.

    Of a tuple or list without such an attribute, the first element is searched.
    """
    if isinstance(batch, Mapping):
        return batch.get(name)
    if isinstance(batch, Tensor):
        return None
    value = getattr(batch, name, None)
    if value is None and isinstance(batch, (list, tuple)) and batch:
        return entry(batch[0], name)
    return value


def _token_mask(
    batch: Any, mask: str | Callable[[Any], Any], samples: int | None
) -> TokenMask | None:
    if callable(mask):
        return _checked(mask(batch), "the result of mask=", samples)
    if mask == "auto":
        return _first_named(batch, _NAMES, samples)
    value = entry(batch, mask)
    if value is None:
        names = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise InputError(f"the batch has no entry {mask!r} for mask= (it is: {names}); {_WRITE}")
    return _checked(value, mask, samples)


def _first_named(batch: Any, names: tuple[str, ...], samples: int | None) -> TokenMask | None:
    for name in names:
        value = entry(batch, name)
        if value is not None:
            return _checked(value, name, samples)
    return None


def _checked(value: Any, name: str, samples: int | None) -> TokenMask:
    """Return a mask as bool, with the reason if it cannot be used.

    Raises:
        InputError: if the value cannot be read as a tensor.
    """
    try:
        mask = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} is a {type(value).__name__}, not a mask; {_WRITE}") from None
    count = int(mask.shape[-1]) if mask.ndim else 0
    if mask.ndim != 2 or samples not in (None, len(mask)):
        return TokenMask(
            count,
            problem=(
                f"{name} has shape {tuple(mask.shape)}, but a mask of the tokens of "
                f"{samples} samples must have shape ({samples}, tokens); {_WRITE}"
            ),
        )
    if type(mask) is not Tensor:  # a fake tensor, which has no values
        return TokenMask(count)
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        return TokenMask(
            count,
            problem=(
                f"{name} has values other than 0 and 1 ({mask.min().item()} to "
                f"{mask.max().item()}); {_WRITE}"
            ),
        )
    # In the masks of torch.nn.Transformer, True is padding.
    real = mask == 0 if name.endswith("key_padding_mask") else mask != 0
    if bool(real.all()):
        return TokenMask(count)
    empty = (~real.any(1)).nonzero().flatten().tolist()
    if empty:
        return TokenMask(
            count,
            problem=(
                f"{name} has no token, only padding, for {len(empty)} of {len(mask)} samples "
                f"(the first is sample {empty[0]} of the batch); leave these samples out of the "
                "data, or write mask=None to use every position"
            ),
        )
    return TokenMask(count, real)


BatchTuple: TypeAlias = tuple[Any, ...]
"""One batch of each data loader: one or two."""


def batch_tuples(loaders: tuple[Iterable[Any], ...], min_samples: int) -> Iterator[BatchTuple]:
    """Yield one batch of each loader at a time, with as few batches as possible too small.

    A batch with fewer than ``min_samples`` samples is concatenated with the batch before it if
    that batch is still available.

    Args:
        loaders: one loader, or two with the same samples.
        min_samples: smallest number of samples that the estimator can use.

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
        # The last batches of a rank may contain samples that the sampler repeated as padding.
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
    except ValueError:  # another structure: the small batch is then left out, with a warning
        return None
