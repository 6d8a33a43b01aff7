"""Find the samples of a batch: which axis they are in, how many, and which tokens are padding.

By default the samples are in axis 0 of every tensor that the model gets. If these tensors disagree,
nothing is chosen: the error shows the shapes, and ``CKA(samples=...)`` decides.

Of the names of masks, ``attention_mask`` and ``decoder_attention_mask`` are those of Hugging Face's
models: 1 is a token, 0 is padding. ``src_key_padding_mask`` and ``tgt_key_padding_mask`` are those
of ``torch.nn.Transformer``, in which True is padding.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from cka.capture.outputs import TokenMask, map_named, named_tensors, shapes_of
from cka.errors import InputError, SettingError

Samples: TypeAlias = int | str | Sequence[str] | Callable[[Any], int] | None
"""What users write as ``samples=``."""

_WRITE = (
    'write samples="name" if that entry of the batch has the samples in axis 0, samples=1 if '
    "batches are (tokens, samples, ...), or samples=function if function(batch) returns the "
    "number of samples"
)


class SampleRule:
    """Says for batches, and for the inputs of a model, which axis has the samples."""

    def __init__(self, samples: Samples = None) -> None:
        """Check what the user passed.

        Args:
            samples: None (axis 0 of every tensor), an axis, the name of an entry of the batch or
                several, or a function of the batch that returns the number of samples.

        Raises:
            SettingError: if it is none of these.
        """
        self._axis = 0
        self._names: tuple[str, ...] = ()
        self._count: Callable[[Any], int] | None = None
        self.is_set = samples is not None
        if isinstance(samples, str):
            self._names = (samples,)
        elif isinstance(samples, int) and not isinstance(samples, bool) and samples >= 0:
            self._axis = samples
        elif (
            isinstance(samples, (list, tuple))
            and samples
            and all(isinstance(name, str) for name in samples)
        ):
            self._names = tuple(samples)
        elif callable(samples):
            self._count = samples
        elif samples is not None:
            raise SettingError(f"cannot use {samples!r} as samples; {_WRITE}")

    def count(self, batch: Any, *, of_feed: bool) -> int | None:
        """Return the number of samples in a batch; None if the batch alone does not show it.

        Args:
            batch: what the loader yields, or the part of it that the model gets.
            of_feed: whether a user's ``feed`` gets the whole batch. A list of tensors may then be a
                list of samples, so it shows nothing.

        Raises:
            InputError: if ``samples=`` does not fit the batch.
        """
        if self._count is not None:
            count = self._count(batch)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise InputError(
                    f"samples= returned {count!r} for a batch, not a number of samples; {_WRITE}"
                )
            return count
        named = self._chosen(dict(named_tensors(batch)))
        if named is None:
            return None
        if of_feed and not self.is_set and _may_be_a_list_of_samples(batch):
            return None
        sizes = self._sizes(named)
        return sizes.pop() if len(sizes) == 1 else None

    def count_of_inputs(self, model: nn.Module, named: Mapping[str, Tensor]) -> int:
        """Return the number of samples of the tensors that a model gets.

        Args:
            model: the model.
            named: the tensors by the names of the model's arguments.

        Raises:
            InputError: if the tensors do not agree.
        """
        chosen = self._chosen(dict(named))
        sizes = self._sizes(chosen or {}, model)
        is_list = not self.is_set and _has_a_list(named)
        if len(sizes) == 1 and not is_list:
            return sizes.pop()
        inputs_text = f"of shapes {shapes_of(named)}" if named else "without a tensor"
        raise InputError(
            f"the number of samples is not known, because the model gets inputs {inputs_text}, "
            "which "
            + ("may be a list of samples" if is_list else f"differ in axis {self._axis}")
            + f"; {_WRITE}"
        )

    def axis_of(self, name: str, tensor: Tensor, model: nn.Module | None = None) -> int | None:
        """Return the axis that may have the samples of one of the model's inputs, or None.

        Args:
            name: name of the input.
            tensor: the input.
            model: the model, if it is the model's own input. A model with ``batch_first=False``,
                such as ``nn.LSTM``, has the samples of (t, n, d) inputs in axis 1.
        """
        axis = self._axis
        if not self.is_set and tensor.ndim == 3 and tensor.is_floating_point():
            axis = 1 if getattr(model, "batch_first", True) is False else 0
        if self._axis > 0 and tensor.ndim <= self._axis:
            axis = 0  # a label (n,) of samples in (t, n, d)
        return axis if tensor.ndim > axis else None

    def _chosen(self, named: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the tensors that ``samples=`` names, or all of them; None if none are there."""
        if not self._names:
            return named or None
        chosen = {
            name: tensor
            for name, tensor in named.items()
            if any(name == wanted or name.endswith(f".{wanted}") for wanted in self._names)
        }
        return chosen or None

    def _sizes(self, named: Mapping[str, Tensor], model: nn.Module | None = None) -> set[int]:
        sizes = set()
        for name, tensor in named.items():
            axis = self.axis_of(name, tensor, model)
            if axis is not None:
                sizes.add(int(tensor.shape[axis]))
        # A tensor (1, ...) beside tensors of n samples is the same for all of them.
        return sizes - {1} if len(sizes) > 1 else sizes

    def first(self, batch: Any, count: int, samples: int) -> Any:
        """Return the first samples of a batch: views, in the same structure.

        Args:
            batch: a batch of ``samples`` samples; a tensor of another size is kept.
            count: how many samples to keep.
            samples: the number of samples in the batch.
        """

        def cut(name: str, tensor: Tensor) -> Tensor:
            axis = self.axis_of(name, tensor)
            if axis is None or tensor.shape[axis] != samples:
                return tensor
            return tensor.narrow(axis, 0, count)

        return map_named(batch, cut)

    def agrees(self, batch: Any, samples: int) -> bool:
        """Whether every tensor of a batch has that many samples, so that batches can be joined."""
        named = dict(named_tensors(batch))
        axes = {name: self.axis_of(name, tensor) for name, tensor in named.items()}
        return bool(named) and all(
            axis is not None and named[name].shape[axis] == samples for name, axis in axes.items()
        )


def _has_a_list(named: Mapping[str, Tensor]) -> bool:
    """Whether one of the inputs is a list of tensors that are all alike, as samples are."""
    lists: dict[str, list[int]] = {}
    for name, tensor in named.items():
        if name.endswith("]"):
            lists.setdefault(name.rpartition("[")[0], []).append(tensor.ndim)
    return any(len(each) > 1 and len(set(each)) == 1 for each in lists.values())


def _may_be_a_list_of_samples(batch: Any) -> bool:
    """Whether the tensors of a list have the same number of dimensions, as images have."""
    if dataclasses.is_dataclass(batch) or not isinstance(batch, (list, tuple)):
        return False
    dimensions = [part.ndim for part in batch if isinstance(part, Tensor)]
    return len(dimensions) == len(batch) > 0 and len(set(dimensions)) == 1


ENCODER, DECODER = "encoder", "decoder"
"""The names of the tokens of a model, and of those of its decoder if it has both."""

Source: TypeAlias = str | Callable[[Any], Any]
"""A name in the batch, or a function of the batch."""

Mask: TypeAlias = Source | Mapping[str, Source] | None
"""Where one mask is, ``"auto"``, where the mask of each input is, or None for no mask."""

Masks: TypeAlias = dict[str, TokenMask | None]
"""The mask of each kind of tokens; None if all are real."""

_NAMES = ("attention_mask", "src_key_padding_mask")
_DECODER_NAMES = ("decoder_attention_mask", "tgt_key_padding_mask")
_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "tgt", *_DECODER_NAMES)
_WRITE_MASKS = (
    "write mask=function, where function(batch) returns a (samples, tokens) tensor with 1 for "
    "tokens and 0 for padding, or mask=None to use every position"
)


def check_masks(mask: Any) -> tuple[Mask, Mask]:
    """Return the masks of both models: one for both, or a pair.

    Args:
        mask: what the user passed: a name, a function, None, or a pair of these.

    Raises:
        SettingError: if a mask is neither a name, a function nor None.
    """
    masks = tuple(mask) if isinstance(mask, (list, tuple)) else (mask, mask)
    if len(masks) != 2 or not all(map(_is_mask, masks)):
        raise SettingError(
            f"cannot use {mask!r} as a mask; write the name of an entry of the batch, a function "
            "of the batch, a mapping from inputs of the model to names or functions, or None. For "
            "two models you may pass a pair, with one of these for each model"
        )
    return masks[0], masks[1]


def _is_mask(mask: Any) -> bool:
    if isinstance(mask, Mapping):
        return bool(mask) and all(
            isinstance(name, str) and (isinstance(source, str) or callable(source))
            for name, source in mask.items()
        )
    return mask is None or isinstance(mask, str) or callable(mask)


def find_masks(batch: Any, mask: Mask, model: nn.Module, samples: int | None) -> Masks:
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
        return {}
    if isinstance(mask, Mapping):
        return {name: _token_mask(batch, source, samples) for name, source in mask.items()}
    masks = {ENCODER: _token_mask(batch, mask, samples)}
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) is True or any(
        entry(batch, name) is not None for name in _DECODER_INPUTS
    ):
        masks[DECODER] = _first_named(batch, _DECODER_NAMES, samples)
    return masks


def check_kinds(batch: Any, masks: Masks, model: nn.Module, samples: int | None) -> None:
    """Check that the tokens of an encoder are not confused with those of a decoder.

    Args:
        batch: a batch of the loader.
        masks: those of the batch, from :func:`find_masks`.
        model: the model.
        samples: number of samples in the batch; None if the batch does not show it.

    Raises:
        InputError: if the model has both, and one of them has no mask.
    """
    kinds = {**find_masks(batch, "auto", model, samples), **masks}
    if len(kinds) > 1 and any(masks.get(kind) is None for kind in kinds):
        raise InputError(
            'pooling="tokens" needs one mask for each kind of tokens, but this model has several '
            f"kinds ({' and '.join(kinds)}); add attention_mask and decoder_attention_mask to the "
            f"batch, or write mask={{'name of an input': ...}}"
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


def _token_mask(batch: Any, mask: Source, samples: int | None) -> TokenMask | None:
    if not isinstance(mask, str):
        return _checked(mask(batch), "the result of mask=", samples)
    if mask == "auto":
        return _first_named(batch, _NAMES, samples)
    value = entry(batch, mask)
    if value is None:
        known = f"it is a {type(batch).__name__}"
        if isinstance(batch, Mapping):
            known = f"its entries are {', '.join(map(str, batch))}"
        raise InputError(f"the batch has no entry {mask!r} for mask= ({known}); {_WRITE_MASKS}")
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
        raise InputError(
            f"{name} is a {type(value).__name__}, not a mask; {_WRITE_MASKS}"
        ) from None
    count = int(mask.shape[-1]) if mask.ndim else 0
    if mask.ndim != 2 or samples not in (None, len(mask)):
        return TokenMask(
            count,
            name,
            problem=(
                f"{name} has shape {tuple(mask.shape)}, but a mask of the tokens of "
                f"{samples} samples must have shape ({samples}, tokens); {_WRITE_MASKS}"
            ),
        )
    if type(mask) is not Tensor:  # a fake tensor, which has no values
        return TokenMask(count, name)
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        return TokenMask(
            count,
            name,
            problem=(
                f"{name} has values other than 0 and 1 (from {mask.min().item()} to "
                f"{mask.max().item()}); {_WRITE_MASKS}"
            ),
        )
    # In the masks of torch.nn.Transformer, True is padding.
    real = mask == 0 if name.endswith("key_padding_mask") else mask != 0
    if bool(real.all()):
        return TokenMask(count, name)
    empty = (~real.any(1)).nonzero().flatten().tolist()
    if empty:
        return TokenMask(
            count,
            name,
            problem=(
                f"{name} has only padding and no token for {len(empty)} of {len(mask)} samples "
                f"(the first is sample {empty[0]} of the batch); leave these samples out of the "
                "data, or write mask=None to use every position"
            ),
        )
    return TokenMask(count, name, real)
