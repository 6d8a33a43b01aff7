"""Which axis of a batch's tensors has the samples, and how many there are: decided here only.

By default the samples are in axis 0 of every tensor that the model gets. If these tensors disagree,
nothing is chosen: the error shows the shapes, and ``CKA(samples=...)`` decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from cka.capture.structures import map_named, named_tensors, shapes_of
from cka.errors import InputError, SettingError

Samples: TypeAlias = int | str | Sequence[str] | Callable[[Any], int] | None
"""What users write as ``samples=``."""

_WRITE = (
    'write samples="name" of an entry that has the samples in axis 0, samples=1 if batches are '
    "(tokens, samples, ...), or samples=lambda batch: the number of samples"
)


class SampleRule:
    """Says for batches, and for the inputs of a model, which axis has the samples."""

    def __init__(self, samples: Samples = None) -> None:
        """Check what the user passed.

        Args:
            samples: None (axis 0 of every tensor), an axis, the name of an entry of the batch or
                several, or a function of the batch that returns the number of samples.

        Raises:
            SettingError: if it is none of these.
        """
        self._axis = 0
        self._names: tuple[str, ...] = ()
        self._count: Callable[[Any], int] | None = None
        self.is_set = samples is not None
        if isinstance(samples, str):
            self._names = (samples,)
        elif isinstance(samples, int) and not isinstance(samples, bool) and samples >= 0:
            self._axis = samples
        elif (
            isinstance(samples, (list, tuple))
            and samples
            and all(isinstance(name, str) for name in samples)
        ):
            self._names = tuple(samples)
        elif callable(samples):
            self._count = samples
        elif samples is not None:
            raise SettingError(f"cannot use {samples!r} as samples; {_WRITE}")

    def count(self, batch: Any, *, of_feed: bool) -> int | None:
        """Return the number of samples in a batch; None if the batch alone does not show it.

        Args:
            batch: what the loader yields, or the part of it that the model gets.
            of_feed: whether a user's ``feed`` gets the whole batch. A list of tensors may then be a
                list of samples, so it shows nothing.

        Raises:
            InputError: if ``samples=`` does not fit the batch.
        """
        if self._count is not None:
            count = self._count(batch)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise InputError(
                    f"samples= returned {count!r} for a batch, not a number of samples; {_WRITE}"
                )
            return count
        named = self._chosen(dict(named_tensors(batch)))
        if named is None:
            return None
        if of_feed and not self.is_set and _may_be_a_list_of_samples(batch):
            return None
        sizes = self._sizes(named)
        return sizes.pop() if len(sizes) == 1 else None

    def count_of_inputs(self, model: nn.Module, named: Mapping[str, Tensor]) -> int:
        """Return the number of samples of the tensors that a model gets.

        Args:
            model: the model.
            named: the tensors by the names of the model's arguments.

        Raises:
            InputError: if the tensors do not agree.
        """
        chosen = self._chosen(dict(named))
        sizes = self._sizes(chosen or {}, model)
        is_list = not self.is_set and _has_a_list(named)
        if len(sizes) == 1 and not is_list:
            return sizes.pop()
        given = f"of shapes {shapes_of(named)}" if named else "without a tensor"
        raise InputError(
            f"the number of samples is not known: the model gets inputs {given}, which "
            + ("may be a list of samples" if is_list else f"differ in axis {self._axis}")
            + f"; {_WRITE}"
        )

    def axis_of(self, name: str, tensor: Tensor, model: nn.Module | None = None) -> int | None:
        """Return the axis that may have the samples of one of the model's inputs, or None.

        Args:
            name: name of the input.
            tensor: the input.
            model: the model, if it is the model's own input. A model with ``batch_first=False``,
                such as ``nn.LSTM``, has the samples of (t, n, d) inputs in axis 1.
        """
        axis = self._axis
        if not self.is_set and tensor.ndim == 3 and tensor.is_floating_point():
            axis = 1 if getattr(model, "batch_first", True) is False else 0
        if self._axis > 0 and tensor.ndim <= self._axis:
            axis = 0  # a label (n,) of samples in (t, n, d)
        return axis if tensor.ndim > axis else None

    def _chosen(self, named: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the tensors that ``samples=`` names, or all of them; None if none are there."""
        if not self._names:
            return named or None
        chosen = {
            name: tensor
            for name, tensor in named.items()
            if any(name == wanted or name.endswith(f".{wanted}") for wanted in self._names)
        }
        return chosen or None

    def _sizes(self, named: Mapping[str, Tensor], model: nn.Module | None = None) -> set[int]:
        sizes = set()
        for name, tensor in named.items():
            axis = self.axis_of(name, tensor, model)
            if axis is not None:
                sizes.add(int(tensor.shape[axis]))
        # A tensor (1, ...) beside tensors of n samples is the same for all of them.
        return sizes - {1} if len(sizes) > 1 else sizes

    def first(self, batch: Any, count: int, samples: int) -> Any:
        """Return the first samples of a batch: views, in the same structure.

        Args:
            batch: a batch of ``samples`` samples; a tensor of another size is kept.
            count: how many samples to keep.
            samples: the number of samples in the batch.
        """

        def cut(name: str, tensor: Tensor) -> Tensor:
            axis = self.axis_of(name, tensor)
            if axis is None or tensor.shape[axis] != samples:
                return tensor
            return tensor.narrow(axis, 0, count)

        return map_named(batch, cut)

    def agrees(self, batch: Any, samples: int) -> bool:
        """Whether every tensor of a batch has that many samples, so that batches can be joined."""
        named = dict(named_tensors(batch))
        axes = {name: self.axis_of(name, tensor) for name, tensor in named.items()}
        return bool(named) and all(
            axis is not None and named[name].shape[axis] == samples for name, axis in axes.items()
        )


def _has_a_list(named: Mapping[str, Tensor]) -> bool:
    """Whether one of the inputs is a list of tensors that are all alike, as samples are."""
    lists: dict[str, list[int]] = {}
    for name, tensor in named.items():
        if name.endswith("]"):
            lists.setdefault(name.rpartition("[")[0], []).append(tensor.ndim)
    return any(len(each) > 1 and len(set(each)) == 1 for each in lists.values())


def _may_be_a_list_of_samples(batch: Any) -> bool:
    """Whether the tensors of a list have the same number of dimensions, as images have."""
    if dataclasses.is_dataclass(batch) or not isinstance(batch, (list, tuple)):
        return False
    dimensions = [part.ndim for part in batch if isinstance(part, Tensor)]
    return len(dimensions) == len(batch) > 0 and len(set(dimensions)) == 1
