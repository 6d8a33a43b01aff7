"""Hooks on, hooks off: what a model's layers put out during one forward pass.

Every output is measured inside its hook, before the network goes on: an in-place activation that
overwrites it later cannot matter any more, and nothing keeps the output alive.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from cka.capture.layers import Call
from cka.capture.outputs import Reader

T = TypeVar("T")


@dataclass
class Taken(Generic[T]):
    """What one forward pass gave."""

    samples: int | None = None
    """Size n of the batch; that of the first output where the batch itself did not tell."""
    values: list[T] = field(default_factory=list)
    """One measurement per distinct output."""
    rows: dict[Call, int] = field(default_factory=dict)
    """Which measurement belongs to each call, in order of execution."""
    misfits: list[Call] = field(default_factory=list)
    """Calls whose output has no tensor with the batch in front."""


class Capture(Generic[T]):
    """Measures the outputs of some modules while a forward pass runs.

    Outputs handed on as the very same, untouched tensor (Identity, blocks, Sequentials, dropout
    in evaluation) are measured once.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        reader: Reader,
        measure: Callable[[Tensor], T],
    ) -> None:
        self._modules = modules
        self._reader = reader
        self._measure = measure
        self._taken: Taken[T] = Taken()
        self._calls: Counter[str] = Counter()
        # Weak: a strong reference would keep every activation of the batch alive.
        self._seen: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the modules watched."""
        return list(self._modules)

    @contextmanager
    def recording(self, samples: int | None) -> Iterator[None]:
        """Put the hooks on for one forward pass of n samples, and take them off however it ends."""
        self.forget()
        self._taken.samples = samples
        handles = []
        try:
            for name, module in self._modules.items():
                handles.append(module.register_forward_hook(partial(self._hook, name)))
            yield
        except BaseException:
            self.forget()
            raise
        finally:
            for handle in handles:
                handle.remove()
            self._seen.clear()

    def take(self) -> Taken[T]:
        """Hand over what was recorded, and keep nothing of it."""
        taken = self._taken
        self.forget()
        return taken

    def forget(self) -> None:
        """Drop everything recorded."""
        self._taken = Taken()
        self._calls.clear()
        self._seen.clear()

    def _hook(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        call = Call(name, self._calls[name])
        self._calls[name] += 1
        # A model may enable gradients in its own forward.
        with torch.no_grad():
            position = self._position(name, module, output)
        if position is None:
            self._taken.misfits.append(call)
        else:
            self._taken.rows[call] = position

    def _position(self, name: str, module: nn.Module, output: Any) -> int | None:
        tensor = self._reader.find(name, output)
        if tensor is None:
            return None
        known = self._known(tensor)
        if known is not None:
            return known
        if self._taken.samples is None and tensor.ndim:
            self._taken.samples = tensor.shape[0]
        features = self._reader.features(module, tensor, self._taken.samples or 0)
        if features is None:
            return None
        self._taken.values.append(self._measure(features.detach()))
        position = len(self._taken.values) - 1
        # Inference tensors count no versions, so that a later change could not be noticed.
        if not tensor.is_inference():
            self._seen[id(tensor)] = (weakref.ref(tensor), tensor._version, position)
        return position

    def _known(self, tensor: Tensor) -> int | None:
        reference, version, position = self._seen.get(id(tensor), (None, -1, -1))
        same = reference is not None and reference() is tensor
        return position if same and tensor._version == version else None
