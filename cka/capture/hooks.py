"""Forward hooks that measure the outputs of a model's layers during one forward pass.

Every output is measured inside its hook, before the next layer runs. A later in-place activation
therefore does not change the measurement, and no reference to the output is kept.
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

from cka.capture import Call
from cka.capture.axes import AxesOfLayers, Layout, Unknown
from cka.capture.outputs import (
    LeftOut,
    OutputReader,
    Pooling,
    TokenMask,
    TokenSamples,
    first_of_tokens,
    last_of_tokens,
    mean_of_tokens,
    readable,
    without_padding,
)
from cka.errors import InputError

T = TypeVar("T")

_POOLED: Mapping[Pooling, Callable[[Tensor, Tensor | None], Tensor]] = {
    "flatten": without_padding,
    "mean": mean_of_tokens,
    "cls": first_of_tokens,
    "last": last_of_tokens,
}


@dataclass
class PassRecord(Generic[T]):
    """The measurements of one forward pass."""

    samples: int | None = None
    """Number n of samples of the batch; None until the model gets its inputs, if only they show
    it."""
    values: list[T] = field(default_factory=list)
    """One measurement for each distinct output."""
    rows: dict[Call, int] = field(default_factory=dict)
    """Position in ``values`` of each call's measurement, in order of execution."""
    left_out: dict[Call, LeftOut] = field(default_factory=dict)
    """Calls whose output cannot be measured, and why."""
    other_tokens: set[Call] = field(default_factory=set)
    """Calls whose output has another number of tokens than the mask of a batch with padding."""
    not_pooled: set[Call] = field(default_factory=set)
    """Calls whose output has positions that the pooling does not know."""
    tokens: TokenSamples | None = None
    """The tokens that are samples; None unless the pooling is "tokens"."""
    error: Exception | None = None
    """The first error of a hook, if hooks do not raise."""

    @property
    def count(self) -> int | None:
        """Number of samples that are compared: of the batch, or of its tokens."""
        return self.samples if self.tokens is None else len(self.tokens.index)


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
        axes: AxesOfLayers,
        *,
        raises: bool = True,
    ) -> None:
        """Prepare to measure these modules.

        Args:
            modules: the modules by name.
            reader: selects the tensor of an output.
            measure: a function of the features (n, ...), and of the mask (n, t) if they are tokens
                (n, t, d) some of which are padding.
            axes: knows which axes of an output have samples and tokens.
            raises: whether an error ends the forward pass. If not, the first one is recorded and
                the pass goes on, because other ranks compute in it too.
        """
        self._raises = raises
        self._modules = modules
        self._reader = reader
        self._measure = measure
        self._axes = axes
        self._masks: Mapping[str, TokenMask | None] = {}
        self._record: PassRecord[T] = PassRecord()
        self._calls: Counter[str] = Counter()
        # Weak references: strong ones would keep every activation of the batch alive.
        self._measured: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the modules whose outputs are measured."""
        return list(self._modules)

    @contextmanager
    def recording(
        self, samples: int | None, masks: Mapping[str, TokenMask | None] | None = None
    ) -> Iterator[PassRecord[T]]:
        """Register hooks for one forward pass, and always remove them afterwards.

        Args:
            samples: number n of samples; None if the batch does not show it.
            masks: which tokens of the batch are padding, by the name of the tokens.
        """
        self.clear()
        self._record.samples = samples
        self._masks = {
            name: mask
            for name, mask in (masks or {}).items()
            if mask and (mask.is_needed or self._reader.tokens_are_samples)
        }
        handles = []
        # Registering is inside, too: an error or Ctrl-C there must not leave hooks behind.
        try:
            for name, module in self._modules.items():
                if isinstance(module, torch.jit.ScriptModule):
                    self._record.left_out[Call(name, 0)] = LeftOut.SCRIPTED
                    continue
                handles.append(module.register_forward_hook(partial(self._hook, name)))
            yield self._record
        except BaseException:
            self.clear()  # a traceback that references this object must not keep measurements alive
            raise
        finally:
            for handle in handles:
                handle.remove()
            self._measured.clear()
            self._masks = {}

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
        if self._record.error is not None:
            return
        try:
            # A model may enable gradients in its own forward.
            with torch.no_grad():
                position = self._position(call, module, output)
        except Exception as error:
            if self._raises:
                raise
            self._record.error = error
            return
        if isinstance(position, LeftOut):
            self._record.left_out[call] = position
        else:
            self._record.rows[call] = position

    def _position(self, call: Call, module: nn.Module, output: Any) -> int | LeftOut:
        """Measure an output and return its position, or the reason why it cannot be measured."""
        tensor = self._reader.find(call.name, output)
        if tensor is None:
            return LeftOut.NO_BATCH
        measured = self._measured_position(tensor)
        if measured is not None:
            return measured
        values = readable(tensor)
        if isinstance(values, LeftOut):
            return values
        if self._record.samples is None:
            raise InputError(
                "the number of samples in the batch is not known, because feed= ran the layer "
                f"{call.label!r} (output {tuple(tensor.shape)}) without calling the model first; "
                "pass a function that returns the number, e.g. samples=lambda batch: len(batch[0])"
            )
        layout = self._axes.of(call, module, values, self._record.samples)
        if isinstance(layout, Unknown):
            return LeftOut.NO_BATCH
        features = self._features(call, values, layout)
        if isinstance(features, LeftOut):
            return features
        self._record.values.append(self._measure(*features))
        position = len(self._record.values) - 1
        # Inference tensors have no version counter, so a later change could not be detected.
        if not tensor.is_inference():
            self._measured[id(tensor)] = (weakref.ref(tensor), tensor._version, position)
        return position

    def _features(self, call: Call, tensor: Tensor, layout: Layout) -> tuple[Tensor, ...] | LeftOut:
        """Return the features of an output, and the mask if they are tokens with padding."""
        if self._reader.tokens_are_samples:
            return self._tokens_as_samples(call, tensor, layout)
        real = self._real(call, tensor, layout)
        if isinstance(real, LeftOut):
            return real
        pooling = self._reader.pooling
        if real is None and (pooling == "flatten" or not layout.positions):
            if pooling != "flatten" and not layout.positions_known:
                self._record.not_pooled.add(call)
            return (tensor.movedim(layout.samples, 0).detach(),)
        many = len(layout.positions) > 1 and pooling in ("cls", "last")
        if many or not layout.positions_known:
            self._record.not_pooled.add(call)
            return (tensor.movedim(layout.samples, 0).detach(),)
        tokens = tokens_of(tensor, layout)
        features = _POOLED[pooling](tokens, real).detach()
        return (features,) if real is None or features.ndim != 3 else (features, real)

    def _tokens_as_samples(
        self, call: Call, tensor: Tensor, layout: Layout
    ) -> tuple[Tensor, ...] | LeftOut:
        """Return the tokens (m, d) that the mask keeps, if they are those of the first layer."""
        if not layout.positions or not layout.positions_known:
            return LeftOut.OTHER_TOKENS
        stream, real = "", self._real(call, tensor, layout)
        if isinstance(real, LeftOut):
            return LeftOut.OTHER_TOKENS
        if self._masks:
            streams = [self._stream(layout, at) for at in layout.positions]
            if len(streams) != 1 or streams[0] not in self._masks:
                return LeftOut.OTHER_TOKENS
            stream = streams[0]
        tokens = tokens_of(tensor, layout)
        shape = (tokens.shape[0], tokens.shape[1])
        mask = self._masks.get(stream)
        if mask is not None and mask.count != shape[1]:
            return LeftOut.OTHER_TOKENS
        samples = self._record.tokens
        if samples is None:
            samples = self._record.tokens = TokenSamples.of(shape, stream, real)
        if (samples.shape, samples.stream) != (shape, stream):
            return LeftOut.OTHER_TOKENS
        return (samples.rows(tokens).detach(),)

    def _stream(self, layout: Layout, axis: int) -> str:
        """Return the name of the tokens in an axis.

        An axis of tokens that is stated, and of which no run shows the name, has the only mask.
        """
        name = layout.streams.get(axis, "-")
        return next(iter(self._masks)) if name == "" and len(self._masks) == 1 else name

    def _real(self, call: Call, tensor: Tensor, layout: Layout) -> Tensor | LeftOut | None:
        """Return the mask (n, t) of the real tokens of an output; None if all are real."""
        if not self._masks:
            return None
        names = {at: self._stream(layout, at) for at in layout.streams}
        of_axes = {at: self._masks[name] for at, name in names.items() if name in self._masks}
        if not of_axes and tensor.ndim > 2 and set(self._axes.probed.problems) & set(self._masks):
            if layout.other_streams or tensor.ndim == 3:
                self._axes.raise_unknown_tokens(call, tensor)
            return LeftOut.TOKENS_UNKNOWN
        if layout.other_streams & set(self._masks) and not of_axes:
            self._record.other_tokens.add(call)
            return None
        if len(of_axes) > 1:
            return LeftOut.PADDED_DIMENSIONS
        for axis, mask in of_axes.items():
            assert mask is not None
            if tensor.shape[axis] != mask.count:
                self._record.other_tokens.add(call)
                return None
            if len(layout.positions) > 1:
                return LeftOut.PADDED_DIMENSIONS
            real = mask.checked()
            return None if real is None else real.to(tensor.device)
        return None

    def _measured_position(self, tensor: Tensor) -> int | None:
        """Return the position of a tensor's measurement if it has not changed since then."""
        reference, version, position = self._measured.get(id(tensor), (None, -1, -1))
        same = reference is not None and reference() is tensor
        return position if same and tensor._version == version else None


def tokens_of(tensor: Tensor, layout: Layout) -> Tensor:
    """Return an output as (n, t, d): its positions in one axis, its features in another.

    Args:
        tensor: the output.
        layout: its axes, with at least one of positions.
    """
    first = [layout.samples, *layout.positions]
    rest = [at for at in range(tensor.ndim) if at not in first]
    ordered = tensor.permute(*first, *rest)
    positions = ordered.flatten(1, len(layout.positions))
    return positions.flatten(2) if rest else positions.unsqueeze(2)
