"""Forward hooks that measure the outputs of a model's layers during one forward pass.

Every output is measured inside its hook, before the next layer runs. A later in-place activation
therefore does not change the measurement, and no reference to the output is kept.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from cka.capture.layers import Call
from cka.capture.outputs import (
    BatchMasks,
    LeftOut,
    OutputReader,
    Pooling,
    TokenTracker,
    first_of_tokens,
    mean_of_tokens,
    without_padding,
)

T = TypeVar("T")

_POOLED: Mapping[Pooling, Callable[[Tensor, Tensor | None], Tensor]] = {
    "flatten": without_padding,
    "mean": mean_of_tokens,
    "cls": first_of_tokens,
}


@dataclass
class PassRecord(Generic[T]):
    """The measurements of one forward pass."""

    samples: int | None = None
    """Number n of samples: of the batch, or of the first output if the batch does not show it."""
    values: list[T] = field(default_factory=list)
    """One measurement for each distinct output."""
    rows: dict[Call, int] = field(default_factory=dict)
    """Position in ``values`` of each call's measurement, in order of execution."""
    left_out: dict[Call, LeftOut] = field(default_factory=dict)
    """Calls whose output cannot be measured, and why."""
    other_tokens: set[Call] = field(default_factory=set)
    """Calls whose output has another number of tokens than the mask of a batch with padding."""


class Capture(Generic[T]):
    """Measures the outputs of selected modules during a forward pass.

    If several modules return the same tensor unchanged (Identity, Sequential, dropout in
    evaluation mode), it is measured once.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        reader: OutputReader,
        measure: Callable[..., T],
        tokens: TokenTracker | None = None,
    ) -> None:
        """Prepare to measure these modules.

        Args:
            modules: the modules by name.
            reader: selects the tensor of an output.
            measure: a function of the features (n, ...), and of the mask (n, t) if they are tokens
                (n, t, d) some of which are padding.
            tokens: knows which tokens are padding; None if none are.
        """
        self._modules = modules
        self._reader = reader
        self._measure = measure
        self._tokens = tokens
        self._record: PassRecord[T] = PassRecord()
        self._calls: Counter[str] = Counter()
        # Weak references: strong ones would keep every activation of the batch alive.
        self._measured: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the modules whose outputs are measured."""
        return list(self._modules)

    @contextmanager
    def recording(self, samples: int | None, masks: BatchMasks | None = None) -> Iterator[None]:
        """Register hooks for one forward pass, and always remove them afterwards.

        Args:
            samples: number n of samples; None if the batch does not show it.
            masks: which tokens of the batch are padding.
        """
        self.clear()
        self._record.samples = samples
        handles = []
        stack = ExitStack()
        # Registering is inside, too: an error or Ctrl-C there must not leave hooks behind.
        try:
            if self._tokens is not None and masks is not None:
                stack.enter_context(self._tokens.following(masks))
            for name, module in self._modules.items():
                if isinstance(module, torch.jit.ScriptModule):
                    self._record.left_out[Call(name, 0)] = LeftOut.SCRIPTED
                    continue
                handles.append(module.register_forward_hook(partial(self._hook, name)))
            yield
        except BaseException:
            self.clear()  # a traceback that references this object must not keep measurements alive
            raise
        finally:
            stack.close()
            for handle in handles:
                handle.remove()
            self._measured.clear()

    def take(self) -> PassRecord[T]:
        """Return what was recorded, and clear this object."""
        record = self._record
        self.clear()
        return record

    def clear(self) -> None:
        """Drop everything that was recorded."""
        self._record = PassRecord()
        self._calls.clear()
        self._measured.clear()

    def _hook(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        call = Call(name, self._calls[name])
        self._calls[name] += 1
        # A model may enable gradients in its own forward.
        with torch.no_grad():
            position = self._position(call, module, args, output)
        if isinstance(position, LeftOut):
            self._record.left_out[call] = position
        else:
            self._record.rows[call] = position

    def _position(self, call: Call, module: nn.Module, args: Any, output: Any) -> int | LeftOut:
        """Measure an output and return its position, or the reason why it cannot be measured."""
        tensor = self._reader.find(call.name, output)
        if tensor is None:
            return LeftOut.NO_BATCH
        measured = self._measured_position(tensor)
        if measured is not None:
            return measured
        if self._record.samples is None and tensor.ndim:
            self._record.samples = tensor.shape[0]
        aligned = self._reader.aligned(module, tensor, self._record.samples or 0)
        if isinstance(aligned, LeftOut):
            return aligned
        real = self._real(call, args, aligned)
        if isinstance(real, LeftOut):
            return real
        features = aligned
        if aligned.ndim == 3:
            features = _POOLED[self._reader.pooling](aligned, real)
        masks = () if real is None or features.ndim != 3 else (real,)
        self._record.values.append(self._measure(features.detach(), *masks))
        position = len(self._record.values) - 1
        # Inference tensors have no version counter, so a later change could not be detected.
        if not tensor.is_inference():
            self._measured[id(tensor)] = (weakref.ref(tensor), tensor._version, position)
        return position

    def _real(self, call: Call, args: Any, tensor: Tensor) -> Tensor | LeftOut | None:
        """Return the mask (n, t) of the real tokens of a (n, ...) tensor; None if all are real."""
        masks = [] if self._tokens is None else self._tokens.masks_for(args)
        if tensor.ndim != 3:
            inner = tensor.shape[1:] if tensor.ndim > 3 else ()
            hides_padding = any(mask.count in inner for mask in masks)
            return LeftOut.PADDED_DIMENSIONS if hides_padding else None
        fitting = next((mask for mask in masks if mask.count == tensor.shape[1]), None)
        if masks and fitting is None:
            self._record.other_tokens.add(call)
        real = None if fitting is None else fitting.checked()
        return None if real is None else real.to(tensor.device)

    def _measured_position(self, tensor: Tensor) -> int | None:
        """Return the position of a tensor's measurement if it has not changed since then."""
        reference, version, position = self._measured.get(id(tensor), (None, -1, -1))
        same = reference is not None and reference() is tensor
        return position if same and tensor._version == version else None
