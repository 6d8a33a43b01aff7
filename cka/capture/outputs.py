"""Read a module's output: the tensors in it, their features, and which tokens are padding.

Tensors may be in nested mappings, sequences and dataclasses, as batches are too.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from cka.errors import InputError, SettingError


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested sequences, mappings and dataclasses, depth first."""
    return (tensor for _, tensor in named_tensors(value))


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with its path: ``x``, ``x.mask``, ``x[1]``; depth first.

    >>> import torch
    >>> [name for name, _ in named_tensors({"x": torch.ones(2), "y": [torch.ones(1)]})]
    ['x', 'y[0]']

    Args:
        value: tensors in mappings, sequences and dataclasses.
        name: the path of the value itself.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    for part_name, part in _parts(value, name):
        yield from named_tensors(part, part_name)


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{at}]", part) for at, part in enumerate(value))
        return
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        return
    yield from ((f"{name}.{key}" if name else str(key), part) for key, part in inner)


def map_named(value: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """Return the same nested structure with ``change`` applied to every tensor.

    Mappings become plain dicts. Objects of other types are returned unchanged, even if they have
    a method ``.to``: they need ``CKA(feed=...)``.

    Args:
        value: tensors in mappings, sequences and dataclasses.
        change: a function of a tensor's path and the tensor.
        name: the path of the value itself.
    """
    if isinstance(value, Tensor):
        return change(name, value)
    parts = [map_named(part, change, part_name) for part_name, part in _parts(value, name)]
    if isinstance(value, Mapping):
        return dict(zip(value, parts, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts)
    if isinstance(value, (list, tuple)):
        return type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = copy.copy(value)
        for field, part in zip(dataclasses.fields(value), parts, strict=True):
            # object.__setattr__ also works on the copy of a frozen dataclass.
            object.__setattr__(changed, field.name, part)
        return changed
    return value


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nested structure with ``change`` applied to every tensor.

    Args:
        value: as for :func:`map_named`.
        change: a function of a tensor.
    """
    return map_named(value, lambda _, tensor: change(tensor))


def shapes_of(named: Mapping[str, Tensor], limit: int = 6) -> str:
    """Return names and shapes for a message.

    >>> import torch
    >>> shapes_of({"x": torch.ones(2, 3), "": torch.ones(4)})
    'x (2, 3), (4,)'
    """
    shown = [f"{name} {tuple(tensor.shape)}".strip() for name, tensor in named.items()]
    more = f" and {len(shown) - limit} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + more


Pooling: TypeAlias = Literal["flatten", "mean", "cls", "last", "tokens"]
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

    NOT_IN_EVERY_BATCH = "layers are left out because they did not run in every batch"
    NO_BATCH = (
        "layers are left out because their output has no axis with one entry for each sample of "
        "the batch (pass pick= to choose another tensor, or axes= to name the axis)"
    )
    PADDED_DIMENSIONS = (
        "layers are left out because their output has tokens in more than one axis, as attention "
        "weights have, and padding would change the result (pass pick= to choose a tensor of "
        "(samples, tokens, features), or mask=None)"
    )
    TOKENS_UNKNOWN = (
        "layers are left out because their output has more than three axes, and the model could "
        "not be run on fewer tokens to find those with padding (pass axes= to name the axes, or "
        "mask=None)"
    )
    NO_VALUES = (
        "layers are left out because their output has no values to compare (it is sparse, nested, "
        "on the meta device, or of a dtype without arithmetic; pass pick= to convert it)"
    )
    OTHER_TOKENS = (
        'layers are left out because pooling="tokens" takes each token for a sample, and their '
        "output does not have the same tokens as the first layer (select layers with the same "
        "tokens, or pass axes= to name the token axis)"
    )
    SCRIPTED = (
        "layers are left out because they are scripted or traced, and torch.jit calls no hooks "
        "(compare the modules from which they were made)"
    )
    WIDTH_VARIES = (
        "layers are left out because their number of features per sample differs between batches, "
        'and the exact estimator needs the same number in all (pass pooling="mean", pad all '
        'batches to one length, or use estimator="unbiased")'
    )


@dataclass(frozen=True)
class OutputReader:
    """Selects the tensor of an output, and says how its tokens are reduced.

    Raises:
        SettingError: if the pooling is unknown.
    """

    pooling: Pooling = "flatten"
    """For (n, t, d) outputs: keep all tokens, average them, keep only the first or the last, or
    take each of them for a sample. Padding is left out."""
    pick: Pick | None = None
    """The user's function ``pick(layer_name, output)``; it returns None to skip the layer."""

    def __post_init__(self) -> None:
        """Check that the pooling is known."""
        if self.pooling not in get_args(Pooling):
            raise SettingError(
                f"cannot use {self.pooling!r} as pooling; write 'flatten', 'mean', 'cls', 'last' "
                "or 'tokens'"
            )

    @property
    def tokens_are_samples(self) -> bool:
        """Whether each token is a sample, so that a batch has as many as the mask keeps."""
        return self.pooling == "tokens"

    def check_resamples(self, null: int | None, bootstrap: int | None) -> None:
        """Check that samples may be resampled.

        The tokens of one text depend on each other, so they are not exchangeable: permuted one by
        one, they would make too many layers significant, and drawn one by one, errors too small.

        Raises:
            SettingError: if tokens are samples.
        """
        for name, count in (("null", null), ("bootstrap", bootstrap)):
            if count is not None and self.tokens_are_samples:
                raise SettingError(
                    f"pooling='tokens' does not support {name}=, got {name}={count}, because the "
                    "tokens of one text depend on each other and cannot be resampled one by one; "
                    "omit the argument (result.standard_error is over batches), or use "
                    "pooling='mean', 'cls' or 'last', whose samples are texts"
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


def readable(tensor: Tensor) -> Tensor | LeftOut:
    """Return a tensor whose values can be read as numbers, or why there is none.

    Args:
        tensor: the output of a layer.
    """
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return LeftOut.NO_VALUES
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor if tensor.dtype in _DTYPES else LeftOut.NO_VALUES


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
    name: str = "mask="
    """Its name in the batch."""
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

    def to(self, device: torch.device) -> TokenMask:
        """Return the mask on a device."""
        if self.real is None:
            return self
        return replace(self, real=self.real.to(device, non_blocking=device.type != "cpu"))


@dataclass(frozen=True)
class TokenSamples:
    """The tokens of a batch of n samples with t tokens each, m of which are samples themselves."""

    shape: tuple[int, int]
    """(n, t)."""
    stream: str
    """The name of the tokens; empty if there is no mask."""
    index: Tensor
    """Positions of the m tokens among all n · t, in random order, on the CPU."""
    counts: Tensor
    """How many tokens of each sample are kept, (n,), on the CPU."""

    @classmethod
    def of(cls, shape: tuple[int, int], stream: str, real: Tensor | None) -> TokenSamples:
        """Return the tokens that a mask keeps.

        Their order is random, and the same for all layers and models with as many tokens: parts of
        a batch (``hsic_batch_size``) are then random tokens of all samples, not neighbours in one.

        Args:
            shape: numbers n of samples and t of tokens.
            stream: the name of the tokens.
            real: True for tokens and False for padding, (n, t); None if no token is padding.
        """
        n, t = shape
        kept = torch.ones(n, t, dtype=torch.bool, device="cpu") if real is None else real.cpu()
        index = kept.flatten().nonzero().flatten()
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(index), generator=generator, device="cpu")
        return cls(shape, stream, index[order], kept.sum(1))

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the tokens (m, d) of a (n, t, d) tensor."""
        index = self.index.to(tensor.device)
        return _at(tensor, (index // self.shape[1], index % self.shape[1]))


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
    return _tokens_at(tensor, real.to(torch.uint8).argmax(1))


def last_of_tokens(tensor: Tensor, real: Tensor | None) -> Tensor:
    """Return the last real token of each sample, (n, d), on whichever side the padding is.

    Args:
        tensor: tokens, (n, t, d).
        real: True for tokens and False for padding, (n, t); None if no token is padding.
    """
    if real is None:
        return tensor[:, -1]
    return _tokens_at(tensor, real.shape[1] - 1 - real.flip(1).to(torch.uint8).argmax(1))


def _tokens_at(tensor: Tensor, positions: Tensor) -> Tensor:
    """Return one token of each sample, (n, d), by its position, (n,)."""
    return _at(tensor, (torch.arange(len(tensor), device=tensor.device), positions))


def _at(tensor: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
    other = _INDEXED_AS.get(tensor.dtype)
    return tensor[index] if other is None else tensor.view(other)[index].view(tensor.dtype)


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
        The tensor itself if no token is padding, otherwise a copy, in float32 unless its dtype has
        as many digits: a mean that is rounded to half precision would add to the products.
    """
    if real is None:
        return tensor
    dtype = _mean_dtype(tensor.dtype)
    # A copy with the strides of a contiguous tensor, in one step.
    filled = torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)
    size = _part_size(tensor.shape[1])
    for part, kept in zip(filled.split(size, 1), real.split(size, 1), strict=True):
        sample = kept.to(torch.uint8).argmax(0)
        first = part[sample, torch.arange(part.shape[1], device=part.device)].to(dtype)
        differences = (part.to(dtype) - first).masked_fill_(~kept[:, :, None], 0)
        count = kept.sum(0)[:, None]
        mean = torch.where(count > 0, first + differences.sum(0) / count.clamp(min=1), 0)
        part.copy_(torch.where(kept[:, :, None], part, mean))
    return filled


def _part_size(length: int) -> int:
    """Return the length of one of eight parts: an eighth of a tensor is copied at a time."""
    return max(1, -(-length // 8))


def _mean_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex64 if dtype == torch.complex32 else dtype
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
