"""Which axis of a layer's output has the samples, and which have tokens or other positions.

Two sizes that happen to be equal never decide. An axis is known from ``CKA(axes=...)``, or from
:mod:`cka.capture.probe`, which runs the model on fewer samples and on fewer tokens: the axis that
changes is theirs. Where a model cannot be run in that way, the classes of its modules decide, and
what they leave open is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

from torch import Tensor, nn

from cka.capture import Call, matches_glob
from cka.errors import InputError, SettingError

Shape: TypeAlias = tuple[int, ...]

_SAMPLES, _POSITIONS, _FEATURES, _REST = "n", "thw", "cd", "..."
_WRITE = (
    "write axes={'layer or glob': 'ntd'} with one letter for each axis (n: samples; t, h or w: "
    "tokens or other positions; c or d: features) and '...' for any further axes of features"
)

_FEATURES_SECOND = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Upsample, nn.PixelShuffle),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    nn.LocalResponseNorm,
)
_FEATURES_LAST = (
    *(nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.Bilinear, nn.MultiheadAttention),
    *(nn.RNNBase, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)


class Unknown(Enum):
    """What is not known of an output."""

    NO_SAMPLES = auto()
    """No axis has the samples."""


@dataclass(frozen=True)
class Layout:
    """The axes of an output."""

    samples: int
    """The axis of the samples."""
    positions: tuple[int, ...] = ()
    """The axes of tokens or other positions."""
    streams: Mapping[int, str] = field(default_factory=dict)
    """For an axis that has one position for each token of an input: the name of these tokens."""
    other_streams: frozenset[str] = frozenset()
    """Tokens on which the length of an axis depends, without being their number."""
    positions_known: bool = True
    """Whether the output has no other positions than these."""


@dataclass
class Probed:
    """Shapes of outputs in runs on fewer samples and fewer tokens."""

    samples: int = 0
    """Number of samples of the batch."""
    fewer: int = 0
    """Number of samples of the other runs."""
    shapes: dict[Call, Shape] = field(default_factory=dict)
    """Shapes in the run on fewer samples."""
    tokens: dict[str, tuple[int, int, dict[Call, Shape]]] = field(default_factory=dict)
    """For each kind of tokens: their number, their number in a run on fewer, its shapes."""
    problem: str = ""
    """Why the model could not be run on fewer samples; empty if it could, or was not tried."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why it could not be run on fewer tokens of a kind."""


class AxesOfLayers:
    """The axes of the outputs of one model, each decided once and then kept."""

    def __init__(self, model: nn.Module, stated: Mapping[str, str] | None = None) -> None:
        """Keep what is stated.

        Args:
            model: the model.
            stated: letters by the name or glob of layers, from :func:`check_axes`.
        """
        self._model = model
        self._stated = dict(stated or {})
        self._known: dict[Call, Layout | Unknown] = {}
        self._has_classes: dict[tuple[type[nn.Module], ...], bool] = {}
        self.probed = Probed()

    def states_all(self, names: list[str]) -> bool:
        """Whether the axes of all these layers are stated, so that no probe is needed."""
        return bool(names) and all(self._letters(name) for name in names)

    def use(self, probed: Probed) -> None:
        """Decide all axes again from the shapes of new runs."""
        self.probed = probed
        self._known.clear()

    def of(self, call: Call, module: nn.Module, tensor: Tensor, samples: int) -> Layout | Unknown:
        """Return the axes of an output.

        Args:
            call: the call that returned it.
            module: the module.
            tensor: the output.
            samples: number of samples in the batch.

        Raises:
            InputError: if more than one axis may have the samples or the tokens.
        """
        known = self._known.get(call)
        if known is None:
            known = self._decide(call, module, tuple(tensor.shape), samples)
            self._known[call] = known
        if isinstance(known, Layout) and (
            known.samples >= tensor.ndim or tensor.shape[known.samples] != samples
        ):
            return Unknown.NO_SAMPLES
        return known

    def _decide(
        self, call: Call, module: nn.Module, shape: Shape, samples: int
    ) -> Layout | Unknown:
        letters = self._letters(call.name)
        if letters:
            return self._as_stated(call, letters, shape)
        axis = self._samples_axis(call, module, shape, samples)
        if axis is None:
            return Unknown.NO_SAMPLES
        self._check_batch_first(call, module, shape, axis)
        return self._with_positions(call, module, shape, axis)

    def _letters(self, name: str) -> str:
        for pattern, letters in self._stated.items():
            if pattern == name or matches_glob(name, pattern):
                return letters
        return ""

    def _as_stated(self, call: Call, letters: str, shape: Shape) -> Layout:
        before, rest, after = letters.partition(_REST)
        missing = len(shape) - len(before) - len(after)
        if missing < 0 or (missing and not rest):
            raise InputError(
                f"axes= says {letters!r} for the output of {call.label!r}, but this output has "
                f"{len(shape)} axes, {shape}; {_WRITE}"
            )
        expanded = before + "d" * missing + after
        positions = tuple(at for at, letter in enumerate(expanded) if letter in _POSITIONS)
        layout = Layout(expanded.index(_SAMPLES), positions)
        streams = list(self.probed.tokens)
        if len(positions) == 1 and len(streams) <= 1:
            return Layout(layout.samples, positions, {positions[0]: streams[0] if streams else ""})
        return self._with_streams(call, shape, layout)

    def raise_unknown_tokens(self, call: Call, tensor: Tensor) -> None:
        """Raise the error for an output in which tokens with padding cannot be found.

        Raises:
            InputError: always.
        """
        why = next(iter(self.probed.problems.values()), "")
        raise InputError(
            f"the output of {call.label!r}, of shape {tuple(tensor.shape)}, may have padding "
            "tokens. To find their axis, CKA runs the model on fewer tokens too, but this failed "
            f"({why}); pass mask=None, or {_WRITE}"
        )

    # --- samples ---

    def _samples_axis(
        self, call: Call, module: nn.Module, shape: Shape, samples: int
    ) -> int | None:
        fewer = self.probed.shapes.get(call)
        if fewer is not None and len(fewer) == len(shape) and self.probed.samples == samples:
            # A pair of axes that both have the samples is a matrix of similarities: rows first.
            axes = (
                at
                for at, (size, other) in enumerate(zip(shape, fewer, strict=True))
                if size == samples and other == self.probed.fewer
            )
            return next(axes, None)
        batch_first = self._batch_first(call.name, module)
        if len(shape) == 3 and batch_first is not None:
            axis = 0 if batch_first else 1
            return axis if shape[axis] == samples else None
        of_class = (len(shape) > 2 and isinstance(module, _FEATURES_SECOND)) or (
            len(shape) == 2 and isinstance(module, _FEATURES_LAST)
        )
        if of_class:
            return 0 if shape[0] == samples else None
        equal = [at for at, size in enumerate(shape) if size == samples]
        if len(equal) > 1:
            why = f" ({self.probed.problem})" if self.probed.problem else ""
            raise InputError(
                f"the output of {call.label!r}, of shape {shape}, has more than one axis of "
                f"length {samples}, the number of samples in the batch. To tell them apart, CKA "
                f"runs the model on fewer samples too, but this failed{why}; {_WRITE}"
            )
        return 0 if equal == [0] else None

    def _batch_first(self, name: str, module: nn.Module) -> bool | None:
        """Return ``batch_first`` of a module, or of the nearest module around it that has it."""
        while True:
            own = declared_batch_first(module)
            if own is not None or not name:
                return own
            name = name.rpartition(".")[0]
            module = self._model.get_submodule(name)
            if not isinstance(module, _AROUND):
                return None

    def _check_batch_first(self, call: Call, module: nn.Module, shape: Shape, axis: int) -> None:
        own = declared_batch_first(module)
        if own is None or len(shape) != 3 or axis == (0 if own else 1) or axis > 1:
            return
        raise InputError(
            f"{call.label!r} has batch_first={own}, so it expects the samples in axis {1 - axis} "
            f"of its input, but they are in axis {axis} (output {shape}, {shape[axis]} samples); "
            "pass samples=1 if the batches are (tokens, samples, ...). Otherwise give the layer "
            f"batch_first={not own}, or keep the layer as it is and write "
            f"axes={{{call.name!r}: {'ntd' if axis == 0 else 'tnd'!r}}}"
        )

    # --- positions ---

    def _with_positions(self, call: Call, module: nn.Module, shape: Shape, samples: int) -> Layout:
        layout = self._with_streams(call, shape, Layout(samples))
        if layout.positions:
            return layout
        inner = [at for at in range(len(shape)) if at != samples]
        if len(inner) < 2:
            return layout
        features = self._features_axis(module, shape, samples)
        if features is not None:
            positions = tuple(at for at in inner if at != features)
        elif len(inner) == 2:
            positions = (inner[0],)  # (n, t, d), as documented
            if self._has(_FEATURES_SECOND_OF_TEXT):
                return Layout(samples, positions, {}, layout.other_streams, positions_known=False)
        else:
            return Layout(samples, (), {}, layout.other_streams, positions_known=False)
        return Layout(
            samples,
            positions,
            self._streams_without_probe(call, shape, positions),
            layout.other_streams,
        )

    def _with_streams(self, call: Call, shape: Shape, layout: Layout) -> Layout:
        """Return the positions that change with the tokens of an input."""
        before = self.probed.shapes.get(call)
        if before is None or len(before) != len(shape):
            return layout
        positions: set[int] = set(layout.positions)
        streams: dict[int, str] = {}
        others: set[str] = set()
        for name, (tokens, fewer, shapes) in self.probed.tokens.items():
            after = shapes.get(call)
            if after is None or len(after) != len(shape):
                continue
            for at, (size, other) in enumerate(zip(before, after, strict=True)):
                if at == layout.samples or size == other:
                    continue
                positions.add(at)
                if (size, other) == (tokens, fewer) and at not in streams:
                    streams[at] = name
                else:
                    streams.pop(at, None)
                    others.add(name)
        return Layout(layout.samples, tuple(sorted(positions)), streams, frozenset(others))

    def _streams_without_probe(
        self, call: Call, shape: Shape, positions: tuple[int, ...]
    ) -> dict[int, str]:
        """Return the tokens of positions if the model could not be run on fewer of them."""
        if len(positions) != 1 or not self.probed.problems:
            return {}
        names = list(self.probed.problems)
        if len(names) > 1:
            raise InputError(
                f"CKA cannot tell whether an axis of the output of {call.label!r}, of shape "
                f"{shape}, holds the tokens of input {' or '.join(map(repr, names))}. To find out, "
                "CKA runs the model on fewer tokens too, but this failed "
                f"({self.probed.problems[names[0]]}). Write mask=None, or pass the mask of only "
                "one input and compare only layers that have the tokens of that input"
            )
        return {positions[0]: names[0]}

    def _features_axis(self, module: nn.Module, shape: Shape, samples: int) -> int | None:
        """Return the axis of the features if the class of the module says so.

        A module of another class has the axes of the others, if those of the model agree.
        """
        second, last = isinstance(module, _FEATURES_SECOND), isinstance(module, _FEATURES_LAST)
        if not (second or last) and len(shape) > 3:
            second, last = self._has(_FEATURES_SECOND), self._has(_FEATURES_LAST_OF_IMAGES)
        if second == last:
            return None
        if last:
            return len(shape) - 1
        return 1 if samples == 0 else None

    def _has(self, classes: tuple[type[nn.Module], ...]) -> bool:
        if classes not in self._has_classes:  # asked for each layer
            modules = self._model.modules()
            self._has_classes[classes] = any(isinstance(module, classes) for module in modules)
        return self._has_classes[classes]


_FEATURES_SECOND_OF_TEXT = (
    *(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AvgPool1d),
    *(nn.InstanceNorm1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
)
# A linear layer at the end of a convolutional network gets no images, but a LayerNorm does.
_FEATURES_LAST_OF_IMAGES = (nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention)
_AROUND = (
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.ModuleList),
)


def declared_batch_first(module: nn.Module) -> bool | None:
    """Return the ``batch_first`` of a module; of a layer of torch's transformer, its attention's.

    Args:
        module: any module.

    Returns:
        None if it declares none.
    """
    own = getattr(module, "batch_first", None)
    if isinstance(own, bool):
        return own
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return bool(module.self_attn.batch_first)
    if isinstance(module, (nn.TransformerEncoder, nn.TransformerDecoder)) and len(module.layers):
        return declared_batch_first(module.layers[0])
    return None


def check_axes(axes: Any) -> dict[str, str]:
    """Return what the user stated about axes.

    Args:
        axes: letters by the name or glob of layers, or None.

    Raises:
        SettingError: if it is not a mapping, or if letters are unknown or do not have ``n`` once.
    """
    if axes is None:
        return {}
    if not isinstance(axes, Mapping):
        raise SettingError(f"cannot use {axes!r} as axes; {_WRITE}")
    for name, letters in axes.items():
        plain = letters.replace(_REST, "", 1) if isinstance(letters, str) else ""
        known = set(plain) <= set(_SAMPLES + _POSITIONS + _FEATURES)
        if not isinstance(name, str) or not known or plain.count(_SAMPLES) != 1:
            raise SettingError(f"cannot use {letters!r} as the axes of {name!r}; {_WRITE}")
    return dict(axes)
