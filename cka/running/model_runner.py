"""Run one model batch by batch, and measure the outputs of the layers that become rows."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from cka.capture import Selection, format_labels
from cka.capture.axes import AxesOfLayers, Probed
from cka.capture.hooks import Capture, PassRecord
from cka.capture.outputs import LeftOut, OutputReader, TokenMask, map_named, named_tensors
from cka.capture.probe import Change, Prober, changed_inputs, random_state_kept
from cka.data import Counting, model_input, reason_of_failure, run_model, to_device
from cka.errors import CKAError, InputError, LayerError, SettingError
from cka.running import Estimator, Measurement
from cka.running.placement import Lockstep, input_dtype, unwrap
from cka.running.rows import Rows
from cka.samples import Mask, Masks, SampleRule, check_kinds, find_masks, mask_keywords


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
            f"{name} is a scripted or traced model ({type(unwrap(model)).__name__}), whose "
            "layers' outputs cannot be read because torch.jit calls no hooks; pass the nn.Module "
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


Feed: TypeAlias = Callable[[nn.Module, Any], Any]
"""A user's function ``feed(model, batch)`` that runs the model."""


@dataclass(frozen=True)
class InputSettings:
    """What models get of a batch, and what is known of it; the same for all models."""

    feed: Feed | None = None
    """A user's function that runs the model; None to call the model."""
    rule: SampleRule = field(default_factory=SampleRule)
    """Which axis has the samples."""
    cast: bool | tuple[str, ...] = False
    """Whether floating-point inputs get the dtype of the weights: none, all or some entries."""
    axes: Mapping[str, str] = field(default_factory=dict)
    """The axes of layers that the user stated."""

    @property
    def counting(self) -> Counting:
        """How the samples of a loader's batch are counted."""
        return Counting(self.rule, of_feed=self.feed is not None)


def check_cast(cast: Any) -> bool | tuple[str, ...]:
    """Return which inputs are cast.

    Args:
        cast: what the user passed: a bool, a name or names of entries.

    Raises:
        SettingError: if it is none of these.
    """
    if isinstance(cast, bool):
        return cast
    names = (cast,) if isinstance(cast, str) else cast
    if isinstance(names, (list, tuple)) and names and all(isinstance(n, str) for n in names):
        return tuple(names)
    raise SettingError(
        f"cannot use {cast!r} as cast_inputs; write True to cast all floating-point inputs, or "
        "the names of the entries of the batch to cast"
    )


def _on_a_copy(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call of a user's function on a copy of its batch, which it may change in place."""
    assert isinstance(run, partial)
    model, batch = run.args
    return partial(_with_copy, run.func, model, batch)


def _with_copy(feed: Feed, model: nn.Module, batch: Any) -> Any:
    return feed(model, copy.deepcopy(batch))


class _InputsSeenError(Exception):
    """Ends a run of a user's function as soon as it calls the model."""


class ModelRunner:
    """A model with its capture, and the rows that its batches gave."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        selections: Sequence[Selection],
        reader: OutputReader,
        estimator: Estimator,
        device: torch.device,
        settings: InputSettings,
        mask: Mask = "auto",
        lockstep: Lockstep | None = None,
    ) -> None:
        """Prepare to run the model.

        Args:
            model: the network, without wrappers, on its device.
            name: its name in messages.
            selections: the layers to measure; two in a self-comparison with other columns.
            reader: selects the tensor of an output.
            estimator: measures it.
            device: where batches are copied to.
            settings: what it gets of a batch.
            mask: which tokens of a batch are padding.
            lockstep: agrees with other ranks about passes; None if there is no need.
        """
        self._lockstep = Lockstep([model]) if lockstep is None else lockstep
        self._modules = {
            name: module for selection in selections for name, module in selection.modules.items()
        }
        self._axes = AxesOfLayers(model, settings.axes)
        self.capture: Capture[Measurement] = Capture(
            self._modules,
            reader,
            estimator.measure,
            self._axes,
            raises=not self._lockstep.is_needed,
        )
        self.rows = Rows()
        self._model = model
        self._name = name
        self._reader = reader
        self._device = device
        self._settings = settings
        self._mask = mask
        self._is_probed = False
        self._probed_masks: set[str] = set()

    def run(self, batch: Any) -> PassRecord[Measurement]:
        """Run the model on one batch and return the measurements of its selected layers.

        Args:
            batch: a batch of the loader.

        Raises:
            LayerError: if no selected layer returned a tensor with the samples in one axis.
            InputError: if the mask of the batch cannot be used, if the number of samples or an axis
                is not known, or if the model does not take the batch.
        """
        with self._lockstep.passes(partial(self._run_unchanged, batch)) as announce:
            samples = self._settings.counting.count(batch)
            call = self._call_of(batch)
            masks = self._masks(batch, samples)
            samples = self._probe(call, masks, samples, announce)
        with (
            self.capture.recording(samples, masks) as record,
            changed_inputs(self._model, partial(self._note_samples, record)),
        ):
            self._run_explained(call)
        record = self.capture.take()
        with self._lockstep.saying_failures():
            self._check(record)
        return record

    def _check(self, record: PassRecord[Measurement]) -> None:
        if record.error is not None:
            raise record.error
        if not record.values and set(record.left_out.values()) == {LeftOut.OTHER_TOKENS}:
            raise LayerError(f"no layer is left to compare: {LeftOut.OTHER_TOKENS.value}")
        if not record.values:
            problem = self._axes.probed.problem
            raise LayerError(
                "no selected layer ran and returned a tensor with an axis of length "
                f"{record.samples}, the number of samples in the batch (selected: "
                f"{format_labels(self.capture.names)}); select other layers, or pass samples=, "
                "axes= or pick="
                + (
                    ". CKA also ran the model on fewer samples to find the axis of the samples, "
                    f"but the model raised {problem}"
                    if problem
                    else ""
                )
            )

    def run_along(self, batch: Any) -> None:
        """Run the model on a batch as often as other ranks need it, and measure nothing."""
        with self._lockstep.passes(partial(self._run_unchanged, batch)):
            self._probed_masks |= self._lockstep.of_all(())
        self._run_unchanged(batch)

    def _run_unchanged(self, batch: Any) -> None:
        """Run the model on copies, because it may change its inputs in place."""
        call = self._call_of(batch)
        call = _on_a_copy(call) if self._settings.feed is not None else call
        with random_state_kept(self._device), self._intercept(lambda _, tensor: tensor.clone()):
            call()

    @contextmanager
    def _intercept(self, change: Change) -> Iterator[None]:
        def changed(args: Any, kwargs: Any) -> Any:
            by_name = self._by_name(args)
            new = map_named({**by_name, **kwargs}, change)
            return tuple(new[name] for name in by_name), {key: new[key] for key in kwargs}

        with changed_inputs(self._model, changed):
            yield

    def clear(self) -> None:
        """Drop measurements that are not taken yet."""
        self.capture.clear()

    def _masks(self, batch: Any, samples: int | None) -> Masks:
        masks = find_masks(batch, self._mask, self._model, samples)
        if self._reader.tokens_are_samples:
            check_kinds(batch, masks, self._model, samples)
        return {name: mask and mask.to(self._device) for name, mask in masks.items()}

    def _call_of(self, batch: Any) -> Callable[[], Any]:
        """Return a function that runs the model on the batch, which is moved once."""
        settings = self._settings
        if settings.feed is not None:
            moved = to_device(batch, self._device)
            return partial(settings.feed, self._model, moved)
        inputs = model_input(batch)
        keywords: dict[str, Any] = {}
        if not isinstance(inputs, Mapping):
            keywords = to_device(mask_keywords(batch, self._model), self._device)
        dtype = input_dtype(self._model) if settings.cast else None
        names = settings.cast if isinstance(settings.cast, tuple) else None
        inputs = to_device(inputs, self._device, dtype, names)
        return partial(run_model, self._model, inputs, keywords)

    def _named(self, args: Any, kwargs: Any) -> dict[str, Tensor]:
        """Return the tensors that the model gets by the names of its arguments."""
        return dict(named_tensors({**self._by_name(args), **kwargs}))

    def _by_name(self, args: Sequence[Any]) -> dict[str, Any]:
        try:
            parameters = list(inspect.signature(self._model.forward).parameters.values())
        except (TypeError, ValueError):  # a function without a signature
            parameters = []
        single = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
        names = [*single, *(f"[{at}]" for at in range(len(single), len(args)))]
        return dict(zip(names, args, strict=False))

    def _note_samples(self, record: PassRecord[Measurement], args: Any, kwargs: Any) -> None:
        if record.samples is None:
            named = self._named(args, kwargs)
            record.samples = self._settings.rule.count_of_inputs(self._model, named)

    def _probe(
        self,
        call: Callable[[], Any],
        masks: Masks,
        samples: int | None,
        announce: Callable[[], None],
    ) -> int | None:
        """Run the model on fewer samples and tokens, if their axes are not known yet.

        Returns:
            The number of samples; None if only the outputs will show it.
        """
        # Ranks probe the same masks, so that a model that cannot be run on fewer tokens raises on
        # all of them, and none waits in a layer that others do not reach.
        every = self._reader.tokens_are_samples
        names = self._lockstep.of_all(
            name for name, mask in masks.items() if mask and (mask.is_needed or every)
        )
        needed = {name: mask for name, mask in masks.items() if mask and name in names}
        is_new = not self._is_probed or bool(names - self._probed_masks)
        self._is_probed, self._probed_masks = True, self._probed_masks | names
        # If there are several masks, only a run shows which of them a stated axis has.
        if not is_new or (len(names) < 2 and self._axes.states_all(self.capture.names)):
            return samples
        call = _on_a_copy(call) if self._settings.feed is not None else call
        with random_state_kept(self._device):
            if samples is None:
                samples = self._count_by_inputs(call, announce)
            if samples is None:
                return None
            prober = self._prober_of_model(call, announce)
            probed = self._probed_by(prober, samples, needed)
            if self._settings.feed is not None and not prober.was_cut:
                # The user's function called only a part of the model.
                probed = self._probed_by(self._prober_of_batch(call, announce), samples, needed)
            self._axes.use(probed)
        return samples

    def _probed_by(self, prober: Prober, samples: int, masks: Mapping[str, TokenMask]) -> Probed:
        return prober.probe(samples, masks, positions=self._reader.pooling != "flatten")

    def _prober_of_model(self, call: Callable[[], Any], announce: Callable[[], None]) -> Prober:
        def run() -> None:
            announce()
            call()

        return Prober(self._modules, self._reader, run, self._intercept, self._axis_of)

    def _prober_of_batch(self, call: Callable[[], Any], announce: Callable[[], None]) -> Prober:
        """Return a prober that gives the user's function fewer samples."""
        assert isinstance(call, partial)
        feed, model, batch = call.args
        changes: list[Change] = []

        @contextmanager
        def intercept(change: Change) -> Iterator[None]:
            changes.append(change)
            yield

        def run() -> None:
            announce()
            feed(model, map_named(copy.deepcopy(batch), changes[-1]))

        rule = self._settings.rule
        return Prober(self._modules, self._reader, run, intercept, rule.axis_of)

    def _count_by_inputs(self, call: Callable[[], Any], announce: Callable[[], None]) -> int | None:
        """Return the number of samples that the model's own inputs show.

        The model is not run, unless other ranks have to run along.
        """
        seen: list[int] = []

        def stop(args: Any, kwargs: Any) -> None:
            named = self._named(args, kwargs)
            seen.append(self._settings.rule.count_of_inputs(self._model, named))
            if not self._lockstep.is_needed:
                raise _InputsSeenError

        announce()
        try:
            with changed_inputs(self._model, stop):
                call()
        except CKAError as error:
            reason = self._reason(call)
            if reason is None:
                raise
            raise InputError(f"{self._name} cannot run on a batch: {reason}") from error
        except Exception:  # _InputsSeenError, or what the run for the comparison will raise again
            pass
        return seen[0] if seen else None

    def _axis_of(self, name: str, tensor: Tensor) -> int | None:
        return self._settings.rule.axis_of(name, tensor, self._model)

    def _run_explained(self, call: Callable[[], Any]) -> None:
        """Run the model; say what to write if it does not take the batch."""
        try:
            call()
        except CKAError:
            raise
        except Exception as error:
            reason = self._reason(call)
            if reason is None:
                raise
            raise InputError(f"{self._name} cannot run on a batch: {reason}") from error

    def _reason(self, call: Callable[[], Any]) -> str | None:
        """Return why the model does not take its inputs, and what to write; None if not known."""
        if self._settings.feed is not None:
            return None
        assert isinstance(call, partial)
        _, inputs, keywords = call.args
        return reason_of_failure(self._model, inputs, keywords)
