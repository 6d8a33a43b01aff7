"""Masks of padding: found in a batch, checked, and named by the tokens that they belong to.

Of the names of masks, ``attention_mask`` and ``decoder_attention_mask`` are those of Hugging Face's
models: 1 is a token, 0 is padding. ``src_key_padding_mask`` and ``tgt_key_padding_mask`` are those
of ``torch.nn.Transformer``, in which True is padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from cka.capture.outputs import TokenMask
from cka.errors import InputError, SettingError

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
    if len(masks) != 2 or not all(map(_is_mask, masks)):
        raise SettingError(
            f"cannot use {mask!r} as a mask; write the name of a batch's entry, a function of the "
            "batch, a mapping of the model's inputs to these, None, or a pair of these, one for "
            "each model"
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
    found = {ENCODER: _token_mask(batch, mask, samples)}
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) is True or any(
        entry(batch, name) is not None for name in _DECODER_INPUTS
    ):
        found[DECODER] = _first_named(batch, _DECODER_NAMES, samples)
    return found


def check_kinds(batch: Any, found: Masks, model: nn.Module, samples: int | None) -> None:
    """Check that the tokens of an encoder are not taken for those of a decoder.

    Args:
        batch: a batch of the loader.
        found: its masks, from :func:`find_masks`.
        model: the model.
        samples: number of samples in the batch; None if the batch does not show it.

    Raises:
        InputError: if the model has both, and one of them has no mask.
    """
    kinds = {**find_masks(batch, "auto", model, samples), **found}
    if len(kinds) > 1 and any(found.get(kind) is None for kind in kinds):
        raise InputError(
            'pooling="tokens" needs a mask for each kind of tokens of a model with several, '
            f"{' and '.join(kinds)}, to tell them apart: add attention_mask and "
            "decoder_attention_mask to the batch, or write mask={'name of an input': ...}"
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
            name,
            problem=(
                f"{name} has shape {tuple(mask.shape)}, but a mask of the tokens of "
                f"{samples} samples must have shape ({samples}, tokens); {_WRITE}"
            ),
        )
    if type(mask) is not Tensor:  # a fake tensor, which has no values
        return TokenMask(count, name)
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        return TokenMask(
            count,
            name,
            problem=(
                f"{name} has values other than 0 and 1 ({mask.min().item()} to "
                f"{mask.max().item()}); {_WRITE}"
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
                f"{name} has no token, only padding, for {len(empty)} of {len(mask)} samples "
                f"(the first is sample {empty[0]} of the batch); leave these samples out of the "
                "data, or write mask=None to use every position"
            ),
        )
    return TokenMask(count, name, real)
