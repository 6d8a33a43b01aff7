"""From what a module returned to the features of its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from cka.errors import SettingError

Pooling: TypeAlias = Literal["flatten", "mean", "cls"]
Pick: TypeAlias = Callable[[str, Any], Tensor | None]


@dataclass(frozen=True)
class Reader:
    """How outputs are read."""

    pooling: Pooling = "flatten"
    """What becomes of the tokens of an (n, t, d) output: kept, averaged, or only the first."""
    pick: Pick | None = None
    """The user's choice of a tensor: ``pick(layer_name, output)``, None to leave the row out."""

    def __post_init__(self) -> None:
        """Refuse a pooling that does not exist."""
        if self.pooling not in get_args(Pooling):
            raise SettingError(
                f"cannot use {self.pooling!r} as pooling; write 'flatten', 'mean' or 'cls'"
            )

    def find(self, name: str, output: Any) -> Tensor | None:
        """The tensor that stands for an output: the user's choice, else the first one in it.

        Numbers (0-d tensors, such as the loss in front of a Hugging Face output) are passed over.
        """
        if self.pick is not None:
            return self.pick(name, output)
        return next((tensor for tensor in tensors_in(output) if tensor.ndim), None)

    def features(self, module: nn.Module, tensor: Tensor, samples: int) -> Tensor | None:
        """Features (n, ...) of a found tensor; None if its first dimension is not the batch."""
        if tensor.layout != torch.strided or tensor.is_nested:
            return None
        # Sequence-first modules say so: nn.MultiheadAttention, nn.LSTM, nn.TransformerEncoderLayer.
        if tensor.ndim == 3 and getattr(module, "batch_first", True) is False:
            tensor = tensor.transpose(0, 1)
        if tensor.ndim == 0 or tensor.shape[0] != samples:
            return None
        if tensor.ndim == 3 and self.pooling == "mean":
            # Half precision would overflow before the division.
            wide = torch.float32 if tensor.dtype.itemsize < 4 else None
            return tensor.mean(1, dtype=wide)
        if tensor.ndim == 3 and self.pooling == "cls":
            return tensor[:, 0]
        return tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors of a nested output or batch, depth first: sequences, mappings, dataclasses."""
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
