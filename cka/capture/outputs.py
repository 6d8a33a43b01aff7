"""The features of a module's output."""

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
class OutputReader:
    """Selects the tensor of an output and reduces its tokens.

    Raises:
        SettingError: if the pooling is unknown.
    """

    pooling: Pooling = "flatten"
    """For (n, t, d) outputs: keep all tokens, average them, or keep only the first."""
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

    def features(self, module: nn.Module, tensor: Tensor, samples: int) -> Tensor | None:
        """Return a tensor's features (n, ...), or None if its first dimension is not n."""
        if tensor.layout != torch.strided or tensor.is_nested:
            return None
        # nn.MultiheadAttention, nn.LSTM and nn.TransformerEncoderLayer have this attribute.
        if tensor.ndim == 3 and getattr(module, "batch_first", True) is False:
            tensor = tensor.transpose(0, 1)
        if tensor.ndim == 0 or tensor.shape[0] != samples:
            return None
        if tensor.ndim == 3 and self.pooling == "mean":
            # The sum of half-precision tokens could overflow before it is divided.
            wide = torch.float32 if tensor.dtype.itemsize < 4 else None
            return tensor.mean(1, dtype=wide)
        if tensor.ndim == 3 and self.pooling == "cls":
            return tensor[:, 0]
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
