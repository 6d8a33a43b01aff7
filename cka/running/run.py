"""A comparison, and several at once: add measurements of batches, then compute the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from cka.capture import Selection
from cka.capture.hooks import PassRecord
from cka.capture.outputs import LeftOut, named_tensors, shapes_of, tensors_in
from cka.data import Counting
from cka.errors import InputError, LayerError, SettingError
from cka.functional import gram_dtype, sum_dtype
from cka.functional.distributions import calibrate, confidence
from cka.functional.neighbours import Measure, kinds_of
from cka.functional.resampling import BOOTSTRAP, PERMUTATIONS, Kind, Resampled, Resampling
from cka.functional.sums import (
    Sums,
    cka_with_error,
    highest_exponents,
    select_sums,
    sums_on_cpu,
    sums_to_vector,
    vector_to_sums,
    with_exponents,
    zero_sums,
)
from cka.result import CKAResult
from cka.running import BatchMeasurements, Estimator, Measurement, placement
from cka.running.model_runner import ModelRunner
from cka.running.placement import Batches, Lockstep
from cka.running.rows import Rows, RowsOfModel, check_same_tokens, named_warnings, nan_warnings


@dataclass(frozen=True)
class Resamples:
    """How the samples of a comparison are resampled."""

    null: int | None
    """Number of permutations; None for no calibration."""
    bootstrap: int | None
    """Number of resamples with replacement; None for no confidence."""
    seed: int
    """Seed of what is drawn."""
    kinds: tuple[Kind, Kind] = (PERMUTATIONS, BOOTSTRAP)
    """What is drawn, and what is computed of it."""

    @classmethod
    def checked(
        cls,
        null: int | None,
        bootstrap: int | None,
        generator: torch.Generator | None,
        estimator: str,
        measure: Measure | None = None,
    ) -> Resamples:
        """Return the settings, with a seed from the generator, or 0.

        Raises:
            SettingError: if ``null`` or ``bootstrap`` is not an integer, or too small, or if there
                is no bootstrap for the estimator.
        """
        for name, count, counted, least in (
            ("null", null, "permutations", 1),
            ("bootstrap", bootstrap, "resamples", 2),
        ):
            if count is None:
                continue
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                raise SettingError(
                    f"{name} must be a number of {counted}, at least {least}, got {count!r}; "
                    "write e.g. 200"
                )
        if bootstrap is not None and estimator == "sampled_neurons":
            raise SettingError(
                "estimator='sampled_neurons' does not support a bootstrap, got "
                f"bootstrap={bootstrap}; omit bootstrap=, or use estimator='unbiased'"
            )
        if bootstrap is not None and measure is not None and not measure.has_bootstrap:
            raise SettingError(
                f"measure={measure.name!r} does not support a bootstrap, got "
                f"bootstrap={bootstrap}; omit bootstrap=, or use measure='cka' or 'mutual_knn'"
            )
        kinds = (PERMUTATIONS, BOOTSTRAP) if measure is None else kinds_of(measure)
        # A generator that is not needed keeps its state.
        if generator is None or (null is None and bootstrap is None):
            return cls(null, bootstrap, 0, kinds)
        seed = torch.randint(2**53, (), generator=generator, device="cpu")
        return cls(null, bootstrap, int(seed), kinds)

    def of_pair(self, rank: int) -> ResamplingsOfPair:
        """Return what resamples the batches of one pair of models.

        Args:
            rank: number of this process among the ranks of ``torch.distributed``; 0 if alone.
        """
        seed = self.seed + rank  # ranks draw independently of each other
        return ResamplingsOfPair(
            None if self.null is None else Resampling(self.kinds[0], self.null, seed),
            None if self.bootstrap is None else Resampling(self.kinds[1], self.bootstrap, seed),
        )


class ResamplingsOfPair(NamedTuple):
    """What resamples the batches of one pair of models; None if it was not requested."""

    permutations: Resampling | None
    bootstrap: Resampling | None

    def requested(self) -> list[Resampling]:
        """Return those that were requested."""
        return [resampling for resampling in self if resampling is not None]


@dataclass(frozen=True)
class Provenance:
    """What a result says of the models and the settings that it comes from."""

    model1_name: str
    model2_name: str
    self_comparison: bool
    """Whether both are one model, on the same data."""
    estimator: str
    kernel: str
    measure: str


class Outcome(NamedTuple):
    """The result of a comparison, and the warnings for the user."""

    result: CKAResult
    warnings: list[str]
    """What was left out or is NaN, and why."""


class Run:
    """Adds up the batches of one model, compared with itself, or of two models."""

    def __init__(
        self,
        runners: Sequence[RowsOfModel],
        selections: tuple[Selection, Selection],
        estimator: Estimator,
        provenance: Provenance,
        *,
        over_ranks: bool,
        resamplings: ResamplingsOfPair,
        counting: Counting | None,
    ) -> None:
        """Prepare a comparison.

        Args:
            runners: the runner of one model, compared with itself, or of two.
            selections: the layers of the rows' and of the columns' model.
            estimator: gets the measurements.
            provenance: what the result says of the models and settings.
            over_ranks: whether the sums of all ranks of ``torch.distributed`` are added.
            resamplings: the same that the estimator adds to; their sums are read here.
            counting: says how many samples a batch has; None if :meth:`skips` is not called.
        """
        self._counting = counting
        self._first_skipped = ""
        self._resamplings = resamplings
        self.samples = 0
        self.last_samples = 0
        self.batches = 0
        self._skipped_sizes: list[int] = []
        self._runners = runners
        self._selections = selections
        self._estimator, self._provenance = estimator, provenance
        self._over_ranks = over_ranks
        self._result_dtype = torch.float32
        self._device = torch.device("cpu")

    def skip(self, size: int) -> None:
        """Note the size of a batch that has too few samples."""
        self._skipped_sizes.append(size)

    def skips(self, batch: Any) -> bool:
        """Whether a batch has too few samples; if it has, note its size.

        A batch that does not show its number of samples is not skipped: :meth:`add` gets it from
        the first output.
        """
        size = None if self._counting is None else self._counting.count(batch)
        if size is None or size >= self._estimator.min_samples:
            return False
        self._first_skipped = self._first_skipped or shapes_of(dict(named_tensors(batch)), 3)
        self._skipped_sizes.append(size)
        return True

    def add(self, records: Sequence[PassRecord[Measurement]]) -> None:
        """Add one batch; raise InputError if the models returned outputs for different samples."""
        counts = [record.count or 0 for record in records]
        check_same_tokens([record.tokens for record in records])
        if len(set(counts)) > 1:
            raise InputError(
                f"the models returned outputs for {counts[0]} and {counts[-1]} samples of one "
                "batch; run both on the same samples, e.g. in feed="
            )
        if counts[0] < self._estimator.min_samples:
            self._skipped_sizes.append(counts[0])
            return
        first = records[0].values[0].parts[0]
        self._result_dtype, self._device = gram_dtype(first.dtype), first.device
        self._estimator.add(
            [
                BatchMeasurements(record.values, runner.rows.positions(record))
                for record, runner in zip(records, self._runners, strict=True)
            ]
        )
        self.last_samples = counts[0]
        self.samples += counts[0]
        self.batches += 1

    def close(self) -> None:
        """Release all tensors, so that a traceback that references this object keeps none alive."""
        self._estimator.clear()
        for resampling in self._resamplings.requested():
            resampling.clear()
        for runner in self._runners:
            runner.clear()

    def outcome(self) -> Outcome:
        """Compute the result from the sums of this process, or of all ranks.

        Raises:
            InputError: if no batch was large enough, or if the ranks ran different layers.
            LayerError: if one model has no row left.
        """
        sums = self._estimator.sums()
        for runner, uneven in zip(self._runners, self._estimator.uneven, strict=False):
            for row in uneven:
                runner.rows.left_out.setdefault(runner.rows.calls[row], LeftOut.WIDTH_VARIES)
        resampled = [
            None if resampling is None else resampling.sums() for resampling in self._resamplings
        ]
        if self._over_ranks and placement.is_active():
            sums = self._sum_over_ranks(sums)
            if sums is not None:
                resampled = [
                    None
                    if resampling is None
                    else Resampled.of_each_pair(
                        placement.sum_over_ranks(resampling.sums_of_each_pair(sums))
                    )
                    for resampling in self._resamplings
                ]
        if sums is None:
            raise InputError(self._no_batch())
        return self._outcome_of(sums, *resampled)

    def _no_batch(self) -> str:
        least = self._estimator.min_samples
        if not self._skipped_sizes and self.samples:
            return f"{self.samples} samples are too few; pass at least 4 samples in all"
        if not self._skipped_sizes:
            return (
                f"no batch had at least {least} samples, because the loader yielded no batch. A "
                "generator can be used only once; pass a list or a DataLoader"
            )
        shapes = f", the first of shapes {self._first_skipped}" if self._first_skipped else ""
        return (
            f"no batch had at least {least} samples ({len(self._skipped_sizes)} smaller ones were "
            f"skipped{shapes}); use larger batches. Pass samples= if the samples are not in axis "
            "0, and feed= if a batch is a list of samples"
        )

    def _sum_over_ranks(self, sums: Sums | None) -> Sums | None:
        rows = [runner.rows.to_builtin() for runner in self._runners]
        dtype = str(self._result_dtype).removeprefix("torch.")
        own = {
            "samples": self.samples,
            "batches": self.batches,
            "rows": rows,
            "dtype": dtype,
            "exponents": None if sums is None else sums.exponents,
        }
        # A rank without batches has no rows: its loader may have been empty.
        used = [rank for rank in placement.gather(own) if rank["batches"]]
        if not used:
            return None
        # A rank without batches does not know in which dtype the models compute.
        self._result_dtype = getattr(torch, used[0]["dtype"])
        self.samples = sum(rank["samples"] for rank in used)
        self.batches = sum(rank["batches"] for rank in used)
        for index, runner in enumerate(self._runners):
            runner.rows = Rows.merged([Rows.from_builtin(rank["rows"][index]) for rank in used])
        exponents = highest_exponents([rank["exponents"] for rank in used])
        if sums is None:
            shape = (len(self._runners[0].rows.calls), len(self._runners[-1].rows.calls))
            sums = zero_sums(*shape, sum_dtype(self._device), self._device)
            sums = replace(sums, exponents=exponents)
        # Sums of ranks can be added only if their matrices have the same exponents.
        sums = with_exponents(sums, exponents)
        return vector_to_sums(placement.sum_over_ranks(sums_to_vector(sums)), sums)

    def _outcome_of(
        self, sums: Sums, permuted: Resampled | None, bootstrapped: Resampled | None
    ) -> Outcome:
        rows_of_models = (self._runners[0].rows, self._runners[-1].rows)
        orders = [
            [at for at in chosen.order(rows.calls) if rows.calls[at] not in rows.left_out]
            for chosen, rows in zip(self._selections, rows_of_models, strict=True)
        ]
        warnings = self._warnings()
        if not all(orders):
            raise LayerError("; ".join(["no layer is left to compare", *warnings]))
        indices = [torch.tensor(order, device=sums.cross.device) for order in orders]
        selected = select_sums(sums, *indices)
        matrix, error = cka_with_error(selected)
        counts = (len(sums.self1), len(sums.self2))
        calibration = intervals = None
        if permuted is not None:
            calibration = calibrate(selected, permuted.values, permuted.columns_of(counts, *orders))
        if bootstrapped is not None:
            columns = bootstrapped.columns_of(counts, *orders)
            intervals = confidence(selected, bootstrapped.values, columns)
        labels = [
            [rows.calls[at].label for at in order]
            for rows, order in zip(rows_of_models, orders, strict=True)
        ]
        warnings += nan_warnings(labels, [selected.self1, selected.self2])
        result = CKAResult(
            matrix=matrix.to("cpu", self._result_dtype),
            standard_error=error.to("cpu", self._result_dtype),
            model1_layers=labels[0],
            model2_layers=labels[1],
            samples=self.samples,
            batches=self.batches,
            # The sums of all samples at once cannot be added to those of others.
            sums=None if self._provenance.estimator == "exact" else sums_on_cpu(selected),
            calibration=calibration,
            confidence=intervals,
            **asdict(self._provenance),
        )
        return Outcome(result, warnings)

    def _warnings(self) -> list[str]:
        """Return warnings about layers and batches that were left out."""
        never_ran, other_tokens, not_pooled = [], [], []
        left_out: dict[LeftOut, list[str]] = {reason: [] for reason in LeftOut}
        for chosen, runner in zip(
            self._selections, (self._runners[0], self._runners[-1]), strict=True
        ):
            never_ran += chosen.never_ran([*runner.rows.calls, *runner.rows.left_out])
            used = [call for call in runner.rows.calls if call not in runner.rows.left_out]
            other_tokens += [call.label for call in used if call in runner.rows.other_tokens]
            not_pooled += [call.label for call in used if call in runner.rows.not_pooled]
            for reason, labels in left_out.items():
                labels += runner.rows.labels_left_out(reason)
        return named_warnings(
            [
                ("layers are left out because they never ran", never_ran),
                *((reason.value, labels) for reason, labels in left_out.items()),
                (
                    "the mask is not applied to layers whose number of tokens differs from the "
                    "mask's; all positions of these layers are used (pass mask= for their tokens, "
                    "or mask=None)",
                    other_tokens,
                ),
                (
                    "pooling is not applied to layers whose positions are unknown or in several "
                    "axes; all values of these layers are used (pass axes= to name the axes)",
                    not_pooled,
                ),
                (
                    f"batches with fewer than {self._estimator.min_samples} samples are left out; "
                    "their numbers of samples",
                    [str(size) for size in self._skipped_sizes],
                ),
            ]
        )


class SimultaneousRuns:
    """Runs the models on each batch and adds the measurements of each pair to its run.

    If there is only one runner, its model is compared with itself. The measurements of a model are
    kept until all models that it is compared with have run.
    """

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        pairs: Sequence[tuple[int, int]],
        runs: Sequence[Run],
        lockstep: Lockstep,
    ) -> None:
        self._runners, self._lockstep = runners, lockstep
        self._pairs, self._runs = pairs, runs

    def add(self, current: Batches) -> None:
        """Run one batch, or one for each model; skip it if it has too few samples.

        Raises:
            InputError: if the models get different inputs, or different samples.
            LayerError: if no selected layer returned a tensor that has the samples.
        """
        batches = current.batches
        # In a list every run notes the size; any() would stop at the first.
        skipped = [run.skips(batches[0]) for run in self._runs] if current.is_own else [True]
        if any(skipped):
            if self._lockstep.is_needed:
                for number, runner in enumerate(self._runners):
                    runner.run_along(batches[min(number, len(batches) - 1)])
            return
        if len(self._runners) == 1:
            self._add(self._runs[0], [self._runners[0].run(batches[0])])
            return
        before = _versions(batches[0])
        records: dict[int, PassRecord[Measurement]] = {}
        for number, runner in enumerate(self._runners):
            if number > 0 and batches[0] is batches[-1] and _versions(batches[0]) != before:
                raise InputError(
                    f"model{number} changes its input in place, so model{number + 1} would get a "
                    "changed input; pass a second data loader, or a feed= that copies the batch"
                )
            records[number] = runner.run(batches[min(number, len(batches) - 1)])
            self._add_pairs(records, number)

    def _add_pairs(self, records: dict[int, PassRecord[Measurement]], newest: int) -> None:
        """Add the pairs whose second model is the newest, and drop what is no longer needed."""
        for (first, second), run in zip(self._pairs, self._runs, strict=True):
            if second == newest:
                self._add(run, [records[first], records[second]])
        needed = {first for first, second in self._pairs if second > newest}
        for number in set(records) - needed:
            del records[number]

    def _add(self, run: Run, records: Sequence[PassRecord[Measurement]]) -> None:
        with self._lockstep.saying_failures():
            run.add(records)

    def close(self) -> None:
        """Release all tensors, so that a traceback that references this object keeps none alive."""
        for run in self._runs:
            run.close()


def _versions(batch: Any) -> int:
    """Return a number that grows when a tensor of the batch is changed in place."""
    return sum(tensor._version for tensor in tensors_in(batch) if not tensor.is_inference())
