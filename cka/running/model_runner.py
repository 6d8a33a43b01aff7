"""Run one model batch by batch and measure the outputs of its selected layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from cka.capture.hooks import Capture, PassRecord
from cka.capture.layers import Selection, format_labels
from cka.capture.outputs import OutputReader
from cka.capture.tokens import TokenTracker
from cka.data.batches import model_input, run_model, samples_in, to_device
from cka.data.masks import Mask, find_masks, mask_keywords
from cka.errors import LayerError
from cka.running.estimators import Estimator, Measurement
from cka.running.placement import input_dtype
from cka.running.rows import Rows

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
        modules = {name: one for chosen in selections for name, one in chosen.modules.items()}
        self.capture: Capture[Measurement] = Capture(
            modules, reader, estimator.measure, TokenTracker(model)
        )
        self.rows = Rows()
        self._model = model
        self._device = device
        self._dtype = None if feed is not None else input_dtype(model)
        self._feed = feed
        self._mask = mask

    def run(self, batch: Any) -> PassRecord[Measurement]:
        """Run the model on one batch and return the measurements of its selected layers.

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
