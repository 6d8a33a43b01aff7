"""Run one model batch by batch, and measure the outputs of the layers that become rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from cka.capture.hooks import Capture, PassRecord
from cka.capture.layers import Call, Selection, format_labels
from cka.capture.outputs import LeftOut, OutputReader, TokenTracker
from cka.data import Mask, find_masks, mask_keywords, model_input, run_model, samples_in, to_device
from cka.errors import InputError, LayerError
from cka.running.estimators import Estimator, Measurement
from cka.running.placement import input_dtype, unwrap


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison."""

    module: nn.Module
    """The network, without wrappers."""
    selection: Selection
    """Its selected layers."""
    name: str
    """Its name in the result."""


def check_model(model: object, name: str) -> None:
    """Check that hooks can be registered on a model, and that they will be called.

    Args:
        model: what the user passed.
        name: its name in the message of an error.

    Raises:
        InputError: if it is not a torch.nn.Module, or is scripted or traced.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} must be a torch.nn.Module, got {type(model).__name__}; "
            "write a Module whose forward calls it"
        )
    if isinstance(unwrap(model), torch.jit.ScriptModule):
        raise InputError(
            f"{name} is a scripted or traced model ({type(unwrap(model)).__name__}): torch.jit "
            "calls no hooks of its layers, so their outputs cannot be read; pass the nn.Module "
            "from which it was made, with the same weights"
        )


def model_names(
    first: nn.Module, second: nn.Module, given1: str | None, given2: str | None
) -> tuple[str, str]:
    """Return the models' names; two models of one class get a number if no name is given.

    Args:
        first: the rows' model.
        second: the columns' model; the same object in a self-comparison.
        given1: the name that the user gave to the first model; None if none.
        given2: the name that the user gave to the second model; None if none.
    """
    class1, class2 = type(first).__name__, type(second).__name__
    if first is second:
        return given1 or given2 or class1, given2 or given1 or class1
    if class1 == class2 and given1 is None and given2 is None:
        return f"{class1} 1", f"{class2} 2"
    return given1 or class1, given2 or class2


@dataclass
class Rows:
    """The calls of the first batch, and those that some batch does not measure."""

    calls: list[Call] = field(default_factory=list)
    """Calls of the first batch, in order of execution."""
    left_out: dict[Call, LeftOut] = field(default_factory=dict)
    """Calls that cannot be rows, and why: what they returned, or that some batch lacks them."""

    other_tokens: set[Call] = field(default_factory=set)
    """Calls to which the mask of a batch with padding did not apply."""

    def positions(self, record: PassRecord[Any]) -> list[int | None]:
        """Return the position of each row's measurement in ``record``; None if a row is missing.

        A row that is missing from a batch is left out of the result.
        """
        self.left_out.update(record.left_out)
        self.other_tokens.update(record.other_tokens)
        if not self.calls:
            self.calls = list(record.rows)
        # A call that was left out for a reason of its own keeps that reason.
        for call in set(self.calls).symmetric_difference(record.rows):
            self.left_out.setdefault(call, LeftOut.NOT_IN_EVERY_BATCH)
        return [record.rows.get(call) for call in self.calls]

    def labels_left_out(self, reason: LeftOut) -> list[str]:
        """Return the labels of the calls that are left out for this reason."""
        return [call.label for call in sorted(self.left_out) if self.left_out[call] is reason]

    def to_builtin(self) -> dict[str, Any]:
        """Return the rows as builtin types, for other ranks."""
        return {
            "calls": [list(call) for call in self.calls],
            "left_out": [[*call, self.left_out[call].name] for call in sorted(self.left_out)],
            "other_tokens": [list(call) for call in sorted(self.other_tokens)],
        }

    @classmethod
    def from_builtin(cls, data: dict[str, Any]) -> Rows:
        """Rebuild rows from :meth:`to_builtin`."""
        return cls(
            [Call(*call) for call in data["calls"]],
            {Call(name, number): LeftOut[why] for name, number, why in data["left_out"]},
            {Call(*call) for call in data["other_tokens"]},
        )


def merge_rows(rows_of_ranks: Sequence[Rows]) -> Rows:
    """Return the rows of all ranks together.

    Args:
        rows_of_ranks: the rows of each rank that had a batch, at least one.

    Raises:
        InputError: if the calls of two ranks differ.
    """
    first = rows_of_ranks[0]
    for rows in rows_of_ranks:
        if rows.calls != first.calls:
            differing = sorted(set(rows.calls).symmetric_difference(first.calls))
            labels = format_labels([call.label for call in differing])
            raise InputError(
                f"the ranks ran different layers, or in another order ({labels or 'same layers'}); "
                "compare the same models and layers on every rank"
            )
    return Rows(
        first.calls,
        {call: why for rows in rows_of_ranks for call, why in rows.left_out.items()},
        set().union(*(rows.other_tokens for rows in rows_of_ranks)),
    )


Feed: TypeAlias = Callable[[nn.Module, Any], Any]
"""A user's function ``feed(model, batch)`` that runs the model."""


class ModelRunner:
    """A model with its capture, and the rows that its batches gave."""

    def __init__(
        self,
        model: nn.Module,
        selections: Sequence[Selection],
        reader: OutputReader,
        estimator: Estimator,
        device: torch.device,
        feed: Feed | None,
        mask: Mask = "auto",
    ) -> None:
        """Prepare to run the model.

        Args:
            model: the network, without wrappers, on its device.
            selections: the layers to measure; two in a self-comparison with other columns.
            reader: selects the tensor of an output.
            estimator: measures it.
            device: where batches are copied to.
            feed: a user's function that runs the model; None to call the model.
            mask: which tokens of a batch are padding.
        """
        modules = {
            name: module for selection in selections for name, module in selection.modules.items()
        }
        self.capture: Capture[Measurement] = Capture(
            modules, reader, estimator.measure, TokenTracker(model)
        )
        self.rows = Rows()
        self._model = model
        self._device = device
        # A user's function gets the batch in its own dtype: it may convert it itself.
        self._dtype = None if feed is not None else input_dtype(model)
        self._feed = feed
        self._mask = mask

    def run(self, batch: Any) -> PassRecord[Measurement]:
        """Run the model on one batch and return the measurements of its selected layers.

        Args:
            batch: a batch of the loader, with the samples in the first dimension.

        Raises:
            LayerError: if no selected layer returned a tensor with the batch in its first
                dimension.
            InputError: if the mask of the batch cannot be used.
        """
        inputs = batch if self._feed is not None else model_input(batch)
        samples = samples_in(inputs)
        masks = find_masks(batch, self._mask, self._model, samples).to(self._device)
        keywords = {}
        if self._feed is None and not isinstance(inputs, Mapping):
            keywords = to_device(mask_keywords(batch, self._model), self._device)
        inputs = to_device(inputs, self._device, self._dtype)
        with self.capture.recording(samples, masks):
            if self._feed is not None:
                self._feed(self._model, inputs)
            else:
                run_model(self._model, inputs, keywords)
        record = self.capture.take()
        if not record.values:
            raise LayerError(
                "none of the selected layers ran and returned a tensor with the batch in its first "
                f"dimension (selected: {format_labels(self.capture.names)}); select other layers "
                "or pass pick="
            )
        return record
