"""Several comparisons of pairs of models, in which each model runs once on every batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cka.capture.hooks import PassRecord
from cka.capture.outputs import tensors_in
from cka.errors import InputError
from cka.running.estimators import Measurement
from cka.running.model_runner import ModelRunner
from cka.running.run import Run


class SimultaneousRuns:
    """Runs the models on each batch and adds the measurements of each pair to its run.

    If there is only one runner, its model is compared with itself. The measurements of a model are
    kept until all models that it is compared with have run.
    """

    def __init__(
        self, runners: Sequence[ModelRunner], pairs: Sequence[tuple[int, int]], runs: Sequence[Run]
    ) -> None:
        self._runners = runners
        self._pairs = pairs
        self._runs = runs

    def add(self, batches: Sequence[Any]) -> None:
        """Run one batch, or one for each model; skip it if it has too few samples.

        Raises:
            InputError: if the models get different inputs, or different numbers of samples.
            LayerError: if no selected layer returned a tensor with the batch in its first
                dimension.
        """
        skipped = [run.skips(batches[0]) for run in self._runs]
        if any(skipped):
            return
        if len(self._runners) == 1:
            self._runs[0].add([self._runners[0].run(batches[0])])
            return
        before = _versions(batches[0])
        records: dict[int, PassRecord[Measurement]] = {}
        for number, runner in enumerate(self._runners):
            if number > 0 and batches[0] is batches[-1] and _versions(batches[0]) != before:
                raise InputError(
                    f"model{number} changes its input in place, so model{number + 1} would get a "
                    "different input; pass a second data loader, or feed= with a copy of the batch"
                )
            records[number] = runner.run(batches[min(number, len(batches) - 1)])
            self._add_pairs(records, number)

    def _add_pairs(self, records: dict[int, PassRecord[Measurement]], newest: int) -> None:
        """Add the pairs whose second model is the newest, and drop what is no longer needed."""
        for (one, other), run in zip(self._pairs, self._runs, strict=True):
            if other == newest:
                run.add([records[one], records[other]])
        needed = {one for one, other in self._pairs if other > newest}
        for number in set(records) - needed:
            del records[number]

    def close(self) -> None:
        """Release all tensors, so that a traceback that references this object keeps none alive."""
        for run in self._runs:
            run.close()


def _versions(batch: Any) -> int:
    """Return a number that grows when a tensor of the batch is changed in place."""
    return sum(tensor._version for tensor in tensors_in(batch) if not tensor.is_inference())
