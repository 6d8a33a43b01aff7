"""Find the masks of padding in a batch.

``attention_mask`` and ``decoder_attention_mask`` are the names of Hugging Face's models: 1 is a
token, 0 is padding. ``src_key_padding_mask`` and ``tgt_key_padding_mask`` are those of
``torch.nn.Transformer``, in which True is padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from cka.capture.tokens import BatchMasks, TokenMask
from cka.errors import InputError, SettingError

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
    """Return the masks of a batch of n samples for one model.

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
    found = {name: value for name, value in entries if isinstance(value, Tensor)}
    try:
        taken = inspect.signature(model.forward).parameters if found else {}
    except (TypeError, ValueError):  # a function without a signature
        return {}
    return {name: value for name, value in found.items() if name in taken}


def entry(batch: Any, name: str) -> Any:
    """Return an entry of a mapping, or an attribute of another object; None if there is none.

    Of a tuple or list without such an attribute, the first element is searched.
    """
    if isinstance(batch, Mapping):
        return batch.get(name)
    if isinstance(batch, Tensor):
        return None
    found = getattr(batch, name, None)
    if found is None and isinstance(batch, (list, tuple)) and batch:
        return entry(batch[0], name)
    return found


def _token_mask(
    batch: Any, mask: str | Callable[[Any], Any], samples: int | None
) -> TokenMask | None:
    if callable(mask):
        return _checked(mask(batch), "the result of mask=", samples)
    if mask == "auto":
        return _first_named(batch, _NAMES, samples)
    found = entry(batch, mask)
    if found is None:
        names = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise InputError(f"the batch has no entry {mask!r} for mask= (it is: {names}); {_WRITE}")
    return _named(found, mask, samples)


def _first_named(batch: Any, names: tuple[str, ...], samples: int | None) -> TokenMask | None:
    for name in names:
        found = entry(batch, name)
        if found is not None:
            return _named(found, name, samples)
    return None


def _named(value: Any, name: str, samples: int | None) -> TokenMask:
    return _checked(value, name, samples, inverted=name.endswith("key_padding_mask"))


def _checked(value: Any, name: str, samples: int | None, *, inverted: bool = False) -> TokenMask:
    """Return a mask as bool, with the reason if it cannot be used."""
    try:
        found = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} is a {type(value).__name__}, not a mask; {_WRITE}") from None
    count = int(found.shape[-1]) if found.ndim else 0
    if found.ndim != 2 or samples not in (None, len(found)):
        return TokenMask(
            count,
            problem=(
                f"{name} has shape {tuple(found.shape)}, but a mask of the tokens of "
                f"{samples} samples must have shape ({samples}, tokens); {_WRITE}"
            ),
        )
    if type(found) is not Tensor:  # a fake tensor, which has no values
        return TokenMask(count)
    if found.dtype != torch.bool and not bool(((found == 0) | (found == 1)).all()):
        return TokenMask(
            count,
            problem=(
                f"{name} has values other than 0 and 1 ({found.min().item()} to "
                f"{found.max().item()}); {_WRITE}"
            ),
        )
    real = found == 0 if inverted else found != 0
    if bool(real.all()):
        return TokenMask(count)
    empty = (~real.any(1)).nonzero().flatten().tolist()
    if empty:
        return TokenMask(
            count,
            problem=(
                f"{name} has no token, only padding, for {len(empty)} of {len(found)} samples "
                f"(the first is sample {empty[0]} of the batch); leave these samples out of the "
                "data, or write mask=None to use every position"
            ),
        )
    return TokenMask(count, real)
