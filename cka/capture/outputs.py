"""The features of a module's output, and which of its tokens are padding."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from cka.errors import InputError, SettingError

Pooling: TypeAlias = Literal["flatten", "mean", "cls"]
Pick: TypeAlias = Callable[[str, Any], Tensor | None]


# Packed and opaque dtypes (4 bits and less) have no arithmetic.
_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.complex32, torch.complex64, torch.complex128),
    }
)


class LeftOut(Enum):
    """Why a layer is left out of a comparison; the value is the text of the warning."""

    NOT_IN_EVERY_BATCH = "layers that did not run in every batch are left out"
    NO_BATCH = (
        "layers whose output has no tensor with the batch in its first dimension are left out "
        "(pass pick= to choose one)"
    )
    PADDED_DIMENSIONS = (
        "layers whose output has more than three dimensions, one of them as long as the mask, are "
        "left out, because padding cannot be found in it (pass pick= to choose a tensor of "
        "(samples, tokens, features), or mask=None)"
    )
    NO_VALUES = (
        "layers whose output has no values to compare (sparse, nested, on the meta device, or of "
        "a dtype without arithmetic) are left out (pass pick= to convert it)"
    )
    SCRIPTED = "layers that are scripted or traced are left out, because torch.jit calls no hooks"
    WIDTH_VARIES = (
        "layers with another number of features per sample in another batch are left out, because "
        'the exact estimator needs the same number in all (pass pooling="mean", pad all batches '
        'to one length, or use estimator="unbiased")'
    )


@dataclass(frozen=True)
class OutputReader:
    """Selects the tensor of an output, and says how its tokens are reduced.

    Raises:
        SettingError: if the pooling is unknown.
    """

    pooling: Pooling = "flatten"
    """For (n, t, d) outputs: keep all tokens, average them, or keep only the first. Padding is
    left out."""
    pick: Pick | None = None
    """The user's function ``pick(layer_name, output)``; it returns None to skip the layer."""

    def __post_init__(self) -> None:
        """Check that the pooling is known."""
        if self.pooling not in get_args(Pooling):
            raise SettingError(
                f"cannot use {self.pooling!r} as pooling; write 'flatten', 'mean' or 'cls'"
            )

    def find(self, name: str, output: Any) -> Tensor | None:
        """Return the tensor of an output: the one that ``pick`` returns, or else the first in it.

        The first tensor is searched depth first. 0-d tensors are ignored, because Hugging Face
        outputs start with the loss.

        Args:
            name: qualified name of the module.
            output: what it returned.
        """
        if self.pick is not None:
            return self.pick(name, output)
        return next((tensor for tensor in tensors_in(output) if tensor.ndim), None)

    def aligned(self, module: nn.Module, tensor: Tensor, samples: int) -> Tensor | LeftOut:
        """Return a tensor with its n samples in the first dimension, or why it cannot be used.

        Args:
            module: the module that returned it.
            tensor: the tensor that :meth:`find` returned.
            samples: number n of samples in the batch.
        """
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            return LeftOut.NO_VALUES
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        if tensor.dtype not in _DTYPES:
            return LeftOut.NO_VALUES
        # nn.MultiheadAttention, nn.LSTM and nn.TransformerEncoderLayer have this attribute. If it
        # is False, their outputs are (tokens, samples, features).
        if tensor.ndim == 3 and getattr(module, "batch_first", True) is False:
            tensor = tensor.transpose(0, 1)
        if tensor.ndim == 0 or tensor.shape[0] != samples:
            return LeftOut.NO_BATCH
        return tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested sequences, mappings and dataclasses, depth first."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        inner: Any = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return
    for part in inner:
        yield from tensors_in(part)


# On a CPU, torch 2.9 cannot index tensors of these dtypes, but others of the same width.
_INDEXED_AS = {
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e4m3fnuz), torch.uint8),
    **dict.fromkeys((torch.float8_e5m2, torch.float8_e5m2fnuz), torch.uint8),
    torch.float8_e8m0fnu: torch.uint8,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


@dataclass(frozen=True)
class TokenMask:
    """The mask of a batch of n samples with t tokens each."""

    count: int
    """Number t of tokens."""
    real: Tensor | None = None
    """True for tokens and False for padding, (n, t); None if no token is padding."""
    problem: str | None = None
    """Why the mask cannot be used. It is an error only if a layer has t tokens."""

    def checked(self) -> Tensor | None:
        """Return ``real``.

        Raises:
            InputError: if the mask cannot be used.
        """
        if self.problem is not None:
            raise InputError(self.problem)
        return self.real

    @property
    def is_needed(self) -> bool:
        """Whether the mask excludes a token, or cannot be used."""
        return self.real is not None or self.problem is not None


@dataclass(frozen=True)
class BatchMasks:
    """The masks of a batch for one model."""

    tokens: TokenMask | None = None
    """Mask of the model's tokens: those of the encoder if it has encoder and decoder."""
    decoder_tokens: TokenMask | None = None
    """Mask of the decoder's tokens."""
    has_decoder: bool = False
    """Whether the decoder has tokens of its own."""

    def to(self, device: torch.device) -> BatchMasks:
        """Return the masks on a device."""
        return replace(
            self,
            tokens=_moved(self.tokens, device),
            decoder_tokens=_moved(self.decoder_tokens, device),
        )


def _moved(mask: TokenMask | None, device: torch.device) -> TokenMask | None:
    if mask is None or mask.real is None:
        return mask
    return replace(mask, real=mask.real.to(device, non_blocking=device.type != "cpu"))


class TokenTracker:
    """Follows a forward pass to know whether an output has the encoder's or the decoder's tokens.

    A model with encoder and decoder computes the encoder's tokens first. From the call of its
    decoder on, tokens are the decoder's, except in a module whose input is the encoder's output,
    such as the key and value projections of cross-attention.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._masks = BatchMasks()
        self._in_decoder = False
        # Weak, because the encoder's output must not live longer than in the model itself.
        self._encoded: weakref.ref[Tensor] | None = None

    @contextmanager
    def following(self, masks: BatchMasks) -> Iterator[None]:
        """Use these masks for one forward pass, and drop them afterwards.

        Args:
            masks: the masks of the batch, on the model's device.
        """
        self._masks = masks
        handles = []
        try:
            if masks.has_decoder:
                encoder, decoder = _encoder_and_decoder(self._model)
                if encoder is not None:
                    handles.append(encoder.register_forward_hook(self._encoder_ended))
                if decoder is not None:
                    handles.append(decoder.register_forward_pre_hook(self._decoder_began))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._masks = BatchMasks()
            self._in_decoder = False
            self._encoded = None

    def _encoder_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        encoded = next((tensor for tensor in tensors_in(output) if tensor.ndim), None)
        self._encoded = None if encoded is None else weakref.ref(encoded)

    def _decoder_began(self, module: nn.Module, args: Any) -> None:
        self._in_decoder = True

    def masks_for(self, args: Sequence[Any]) -> list[TokenMask]:
        """Return the masks that may apply to the output of a module, the likeliest first.

        The list is empty if no token of the batch is padding.

        Args:
            args: positional inputs of the module.
        """
        encoder, decoder = self._masks.tokens, self._masks.decoder_tokens
        if not any(mask is not None and mask.is_needed for mask in (encoder, decoder)):
            return []
        first = args[0] if args else None
        from_encoder = first is not None and self._encoded is not None and first is self._encoded()
        of_decoder = self._in_decoder and not from_encoder
        likeliest, other = (decoder, encoder) if of_decoder else (encoder, decoder)
        # Without a mask for the decoder, the encoder's must not be used for it, even if both have
        # the same number of tokens.
        return [mask for mask in (likeliest, other) if mask is not None] if likeliest else []


def _encoder_and_decoder(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the outermost modules ``encoder`` and ``decoder`` that are in one module."""
    for module in model.modules():
        parts = getattr(module, "encoder", None), getattr(module, "decoder", None)
        if all(isinstance(part, nn.Module) for part in parts):
            return parts
    return None, None


def mean_of_tokens(tensor: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean (n, d) over the real tokens of a (n, t, d) tensor; None means all tokens.

    With the mask m it is Σ_t m_it x_it / Σ_t m_it, as in Reimers & Gurevych 2019 (Sentence-BERT).
    The sum of half-precision tokens could overflow before it is divided, so it is in float32.
    Values of padding do not matter; they may be NaN.

    Args:
        tensor: tokens, (n, t, d).
        real: True for tokens and False for padding, (n, t); None if no token is padding.
    """
    dtype = _mean_dtype(tensor.dtype)
    if real is None:
        return tensor.mean(1, dtype=None if dtype == tensor.dtype else dtype)
    first = first_of_tokens(tensor, real).to(dtype)
    size = _part_size(len(tensor))
    parts = zip(tensor.split(size), first.split(size), real.split(size), strict=True)
    # Differences from the first token, so that the mean of equal tokens is exact. Otherwise
    # rounding would make a constant layer vary with the number of tokens.
    sums = [
        (part.to(dtype) - start[:, None]).masked_fill_(~kept[:, :, None], 0).sum(1)
        for part, start, kept in parts
    ]
    return first + torch.cat(sums) / real.sum(1, keepdim=True)


def first_of_tokens(tensor: Tensor, real: Tensor | None) -> Tensor:
    """Return the first real token of each sample, (n, d).

    Args:
        tensor: tokens, (n, t, d).
        real: True for tokens and False for padding, (n, t); None if no token is padding.
    """
    if real is None:
        return tensor[:, 0]
    first = real.to(torch.uint8).argmax(1)
    samples = torch.arange(len(tensor), device=tensor.device)
    other = _INDEXED_AS.get(tensor.dtype)
    if other is None:
        return tensor[samples, first]
    return tensor.view(other)[samples, first].view(tensor.dtype)


def without_padding(tensor: Tensor, real: Tensor | None) -> Tensor:
    """Return a (n, t, d) tensor in which padding has the mean of the real tokens at its position.

    This is mean imputation (Little & Rubin 2019, ch. 4). With the mask m and the means
    μ_t = Σ_i m_it x_it / Σ_i m_it, the centred linear Gram matrix is then
    K_ij = Σ_t m_it m_jt ⟨x_it - μ_t, x_jt - μ_t⟩: padding adds nothing to the product of two
    samples, and an offset of all tokens does not change CKA. Zeros before centring would make the
    number of tokens itself a feature.

    Args:
        tensor: tokens, (n, t, d).
        real: True for tokens and False for padding, (n, t); None if no token is padding.

    Returns:
        The tensor itself if no token is padding, otherwise a copy, in float32 if its dtype has no
        exact mean.
    """
    if real is None:
        return tensor
    dtype = _mean_dtype(tensor.dtype)
    # float8 and integers have no exact mean of their own dtype.
    has_mean = tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)
    filled = (tensor.clone() if has_mean else tensor.to(dtype)).contiguous()
    size = _part_size(tensor.shape[1])
    for part, kept in zip(filled.split(size, 1), real.split(size, 1), strict=True):
        sample = kept.to(torch.uint8).argmax(0)
        first = part[sample, torch.arange(part.shape[1], device=part.device)].to(dtype)
        differences = (part.to(dtype) - first).masked_fill_(~kept[:, :, None], 0)
        count = kept.sum(0)[:, None]
        mean = torch.where(count > 0, first + differences.sum(0) / count.clamp(min=1), 0)
        part.copy_(torch.where(kept[:, :, None], part, mean.to(part.dtype)))
    return filled


def _part_size(length: int) -> int:
    """Return the length of one of eight parts: an eighth of a tensor is copied at a time."""
    return max(1, -(-length // 8))


def _mean_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex64 if dtype == torch.complex32 else dtype
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
