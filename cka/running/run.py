"""One comparison: batches in, result and remarks out. Everything it holds, it lets go of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from cka.capture.hooks import Capture, Taken
from cka.capture.layers import Call, Selection, listed
from cka.capture.outputs import Reader, tensors_in
from cka.data.batches import call, model_input, samples_in, to_device
from cka.errors import InputError, LayerError
from cka.functional.precision import sum_dtype
from cka.functional.sums import Sums, compute, empty, flatten, pick, unflatten
from cka.running import distributed
from cka.running.estimators import Estimator, Parts, Side
from cka.running.placement import input_dtype

Feed: TypeAlias = Callable[[nn.Module, Any], Any]


class Watcher:
    """A model that is run batch by batch, and the rows it gave."""

    def __init__(
        self,
        model: nn.Module,
        selections: Sequence[Selection],
        reader: Reader,
        estimator: Estimator,
        device: torch.device,
        feed: Feed | None,
    ) -> None:
        modules = {name: one for chosen in selections for name, one in chosen.modules.items()}
        self.capture: Capture[Parts] = Capture(modules, reader, estimator.measure)
        self.rows = Rows()
        self._model = model
        self._device = device
        self._dtype = None if feed is not None else input_dtype(model)
        self._feed = feed

    def run(self, batch: Any) -> Taken[Parts]:
        """Run one batch through the model and take what its layers gave."""
        inputs = batch if self._feed is not None else model_input(batch)
        samples = samples_in(inputs)
        inputs = to_device(inputs, self._device, self._dtype)
        with self.capture.recording(samples):
            if self._feed is not None:
                self._feed(self._model, inputs)
            else:
                call(self._model, inputs)
        taken = self.capture.take()
        if not taken.values:
            raise LayerError(
                "none of the selected layers ran and gave a tensor with the batch in front "
                f"(selected: {listed(self.capture.names)}); select other layers or pass pick="
            )
        return taken


@dataclass
class Rows:
    """The calls that make up the rows: those of the first batch that come back in every other."""

    calls: list[Call] = field(default_factory=list)
    """Calls of the first batch, in order of execution."""
    unsteady: set[Call] = field(default_factory=set)
    """Calls that some batch has and another has not."""
    misfits: set[Call] = field(default_factory=set)
    """Calls that once gave no tensor with the batch in front."""

    def positions(self, taken: Taken[Parts]) -> list[int]:
        """Which measurement each row has in this batch; any one for a row that is missing."""
        self.misfits.update(taken.misfits)
        if not self.calls:
            self.calls = list(taken.rows)
        self.unsteady.update(set(self.calls).symmetric_difference(taken.rows) - self.misfits)
        return [taken.rows.get(call, 0) for call in self.calls]

    @classmethod
    def agreed(cls, everyone: Sequence[Rows]) -> Rows:
        """Rows of all ranks together.

        Raises:
            InputError: if two ranks saw different rows.
        """
        first = everyone[0]
        if any(one.calls != first.calls for one in everyone):
            raise InputError(
                "the ranks saw different layers run; every rank must compare the same models"
            )
        return cls(
            first.calls,
            set().union(*(one.unsteady for one in everyone)),
            set().union(*(one.misfits for one in everyone)),
        )

    def left_out(self) -> set[Call]:
        """Calls that cannot be rows."""
        return self.unsteady | self.misfits


class Share(NamedTuple):
    """What a rank tells the others."""

    samples: int
    batches: int
    rows: list[Rows]


@dataclass(frozen=True)
class Outcome:
    """What a comparison found."""

    matrix: Tensor
    standard_error: Tensor
    rows: list[str]
    columns: list[str]
    samples: int
    batches: int
    remarks: list[str]
    """What was left out and why, for the user to be warned of."""


class Run:
    """Adds up batches of one model (compared with itself) or of two."""

    def __init__(
        self,
        watchers: Sequence[Watcher],
        selections: tuple[Selection, Selection],
        estimator: Estimator,
        *,
        ranks: bool,
    ) -> None:
        self.samples = 0
        self.batches = 0
        self._dropped: list[int] = []
        self._watchers = watchers
        self._selections = selections
        self._estimator = estimator
        self._ranks = ranks
        self._gram_dtype = torch.float32
        self._device = torch.device("cpu")

    def step(self, pair: Sequence[Any]) -> None:
        """Take a batch (one, or one for each model). Too small a one is counted and left out."""
        size = samples_in(pair[0])
        if size is not None and size < self._estimator.fewest:
            self._dropped.append(size)
            return
        before = _versions(pair[0])
        taken = [self._watchers[0].run(pair[0])]
        if len(self._watchers) > 1:
            if pair[0] is pair[-1] and _versions(pair[0]) != before:
                raise InputError(
                    "model1 changes its input in place, so that model2 would get another one; "
                    "pass a second data loader, or feed= with a copy of the batch"
                )
            taken.append(self._watchers[1].run(pair[-1]))
        self._add(taken)

    def _add(self, taken: list[Taken[Parts]]) -> None:
        counts = [one.samples or 0 for one in taken]
        if len(set(counts)) > 1:
            raise InputError(f"the models were given {counts[0]} and {counts[1]} samples")
        if counts[0] < self._estimator.fewest:
            self._dropped.append(counts[0])
            return
        first = taken[0].values[0][0]
        self._gram_dtype, self._device = first.dtype, first.device
        self._estimator.add(
            [
                Side(one.values, watcher.rows.positions(one))
                for one, watcher in zip(taken, self._watchers, strict=True)
            ]
        )
        self.samples += counts[0]
        self.batches += 1

    def close(self) -> None:
        """Let go of everything, so that a traceback that holds this object holds no tensor."""
        self._estimator.forget()
        for watcher in self._watchers:
            watcher.capture.forget()

    def outcome(self) -> Outcome:
        """Compute the result from the sums of this process, or of all ranks.

        Raises:
            InputError: if there was no batch to use.
            LayerError: if no row is left on one side.
        """
        sums = self._estimator.sums()
        if self._ranks and distributed.active():
            sums = self._over_ranks(sums)
        if sums is None:
            raise InputError(
                f"no batch had at least {self._estimator.fewest} samples "
                f"({len(self._dropped)} smaller ones were seen); use larger batches"
            )
        return self._found(sums)

    def _over_ranks(self, sums: Sums | None) -> Sums | None:
        rows = [watcher.rows for watcher in self._watchers]
        everyone = distributed.agree(Share(self.samples, self.batches, rows))
        active = [one for one in everyone if one.batches]
        if not active:
            return None
        self.samples = sum(one.samples for one in active)
        self.batches = sum(one.batches for one in active)
        for at, watcher in enumerate(self._watchers):
            watcher.rows = Rows.agreed([one.rows[at] for one in active])
        if sums is None:
            shape = (len(self._watchers[0].rows.calls), len(self._watchers[-1].rows.calls))
            sums = empty(*shape, sum_dtype(self._device), self._device)
        return unflatten(distributed.add_up(flatten(sums)), sums)

    def _found(self, sums: Sums) -> Outcome:
        sides = (self._watchers[0].rows, self._watchers[-1].rows)
        orders = [
            [at for at in chosen.arrange(side.calls) if side.calls[at] not in side.left_out()]
            for chosen, side in zip(self._selections, sides, strict=True)
        ]
        remarks = self._remarks()
        if not all(orders):
            raise LayerError("; ".join(["no layer is left to compare", *remarks]))
        kept = pick(sums, *(torch.tensor(order, device=sums.cross.device) for order in orders))
        matrix, error = compute(kept)
        labels = [
            [side.calls[at].label for at in order]
            for side, order in zip(sides, orders, strict=True)
        ]
        remarks += _undefined(labels, [kept.self1, kept.self2])
        return Outcome(
            matrix=matrix.to("cpu", self._gram_dtype),
            standard_error=error.to("cpu", self._gram_dtype),
            rows=labels[0],
            columns=labels[1],
            samples=self.samples,
            batches=self.batches,
            remarks=remarks,
        )

    def _remarks(self) -> list[str]:
        idle, misfits, unsteady = [], [], []
        for chosen, watcher in zip(
            self._selections, (self._watchers[0], self._watchers[-1]), strict=True
        ):
            rows = watcher.rows
            seen = [*rows.calls, *rows.unsteady, *rows.misfits]
            idle += chosen.idle(seen)
            misfits += [call.label for call in sorted(rows.misfits)]
            unsteady += [call.label for call in sorted(rows.unsteady - rows.misfits)]
        said = [
            ("layers that never ran are left out", idle),
            (
                "layers whose output has no tensor with the batch in its first dimension are left "
                "out (pass pick= to choose one)",
                misfits,
            ),
            ("layers that did not run in every batch are left out", unsteady),
            (
                f"batches under {self._estimator.fewest} samples are left out, of sizes",
                [str(size) for size in self._dropped],
            ),
        ]
        return [f"{what}: {listed(list(dict.fromkeys(names)))}" for what, names in said if names]


def _versions(batch: Any) -> int:
    return sum(tensor._version for tensor in tensors_in(batch) if not tensor.is_inference())


def _undefined(labels: Sequence[Sequence[str]], own: Sequence[Tensor]) -> list[str]:
    """Remarks on layers without a CKA: HSIC with themselves is 0, or no number at all."""
    constant: list[str] = []
    broken: list[str] = []
    for names, terms in zip(labels, own, strict=True):
        if type(terms) is not Tensor:  # a fake one, of a dry run for its memory: it has no values
            continue
        for name, term in zip(names, terms.tolist(), strict=True):
            if term == 0:
                constant.append(name)
            elif not math.isfinite(term):
                broken.append(name)
    said = [
        ("CKA is NaN for layers that put out the same for every sample", constant),
        ("CKA is NaN for layers that put out NaN or infinity", broken),
    ]
    return [f"{what}: {listed(list(dict.fromkeys(names)))}" for what, names in said if names]
