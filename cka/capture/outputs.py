"""The features of a module's output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from cka.errors import SettingError

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
        """
        if self.pick is not None:
            return self.pick(name, output)
        return next((tensor for tensor in tensors_in(output) if tensor.ndim), None)

    def aligned(self, module: nn.Module, tensor: Tensor, samples: int) -> Tensor | LeftOut:
        """Return a tensor with its n samples in the first dimension, or why it cannot be used."""
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
            return LeftOut.NO_VALUES
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        if tensor.dtype not in _DTYPES:
            return LeftOut.NO_VALUES
        # nn.MultiheadAttention, nn.LSTM and nn.TransformerEncoderLayer have this attribute.
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
    for one in inner:
        yield from tensors_in(one)
