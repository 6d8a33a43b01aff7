"""Comparisons of features that are in folders: two models, or several."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cka.capture import Call, Selection, format_labels
from cka.capture.hooks import PassRecord
from cka.errors import CKAWarning, InputError, SettingError
from cka.functional import HSICEstimator
from cka.functional.kernels import Kernel, kernel_name, resolve_kernel
from cka.functional.neighbours import Measure, check_estimator_of, resolve_measure
from cka.functional.resampling import Resampling
from cka.result import CKAResult
from cka.running import Estimator, Measurement, Minibatch, check_settings
from cka.running.exact import Exact, ExactNeighbours
from cka.running.rows import Rows
from cka.running.run import Provenance, Resamples, Run
from cka.stored import StoredFeatures


class _RowsOfFolder:
    """What a comparison needs of a model whose features are stored."""

    def __init__(self) -> None:
        self.rows = Rows()

    def clear(self) -> None:
        """Nothing is kept."""


def compare_features(
    features1: StoredFeatures | str | os.PathLike[str],
    features2: StoredFeatures | str | os.PathLike[str],
    *,
    kernel: str | Kernel = "linear",
    estimator: str | None = None,
    measure: str | Measure = "cka",
    hsic_batch_size: int | None = None,
    zscore: bool = False,
    null: int | None = None,
    bootstrap: int | None = None,
    generator: torch.Generator | None = None,
    memory_limit_bytes: int | None = None,
) -> CKAResult:
    """Compare the layers of two models whose features are in folders.

    The result is that of a ``CKA(model1, model2)`` on the same batches. Memory is that of the Gram
    matrices of one batch of n samples, 4 n² bytes for each layer of both models, and the features
    of one layer in it. For the "exact" estimator and for measures by neighbours, n is the number
    of all samples.

    Args:
        features1: what :func:`cka.save_features` returned, or its folder; its layers are the rows.
        features2: the same of the other model, from the same samples in the same batches.
        kernel: as for :class:`cka.CKA`.
        estimator: "unbiased" (default of CKA), "biased" or "exact" (default of other measures).
        measure: as for :class:`cka.CKA`: "cka", "mutual_knn", "cknna", or one with another k.
        hsic_batch_size: as for :class:`cka.CKA`.
        zscore: divide each feature by its standard deviation over all samples, so that features
            with large values do not decide alone. One more pass over the files. With "exact", the
            scaled features of all layers are in memory.
        null: as for :meth:`cka.CKA.compare`.
        bootstrap: as for :meth:`cka.CKA.compare`.
        generator: as for :meth:`cka.CKA.compare`.
        memory_limit_bytes: as for :class:`cka.CKA`.

    Returns:
        The result.

    Raises:
        DoesNotFitError: if "exact" would need too much memory.
        InputError: if the batches differ, or a folder has no complete features.
        SettingError: if a setting is unknown.
    """
    settings = StoredSettings(
        kernel, estimator, measure, hsic_batch_size, zscore, memory_limit_bytes
    )
    resamples = settings.resamples(null, bootstrap, generator)
    both = [loaded(features1), loaded(features2)]
    (result,), messages = compare_stored(both, [(0, 1)], settings, resamples)
    for message in messages:
        warnings.warn(message, CKAWarning, stacklevel=2)
    return result


def loaded(features: StoredFeatures | str | os.PathLike[str]) -> StoredFeatures:
    """Return stored features, read from their folder if that is given."""
    return features if isinstance(features, StoredFeatures) else StoredFeatures.load(features)


@dataclass(frozen=True)
class StoredSettings:
    """How stored features are compared; see :func:`compare_features`.

    Raises:
        SettingError: if a setting is unknown, or does not fit the others.
    """

    kernel: str | Kernel = "linear"
    estimator: str | None = None
    measure: str | Measure = "cka"
    hsic_batch_size: int | None = None
    zscore: bool = False
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the settings."""
        check_settings(self.checked_estimator, self.hsic_batch_size)
        if self.checked_estimator == "sampled_neurons":
            raise SettingError(
                "cannot use estimator='sampled_neurons' for stored features; write "
                "estimator='unbiased', 'biased' or 'exact'"
            )
        if self.neighbours is not None and self.kernel != "linear":
            raise SettingError(
                f"measure={self.neighbours.name!r} does not use a kernel, got "
                f"kernel={self.kernel!r}; omit kernel="
            )
        resolve_kernel(self.kernel)

    @property
    def neighbours(self) -> Measure | None:
        """The measure by neighbours; None for CKA."""
        return resolve_measure(self.measure)

    @property
    def checked_estimator(self) -> str:
        """The name of the estimator."""
        return check_estimator_of(self.neighbours, self.estimator)

    def resamples(
        self, null: int | None, bootstrap: int | None, generator: torch.Generator | None
    ) -> Resamples:
        """Return how samples are resampled; the arguments are those of ``compare``."""
        return Resamples.checked(
            null, bootstrap, generator, self.checked_estimator, self.neighbours
        )

    def make_estimator(self, samples: int, resamplings: Sequence[Resampling]) -> Estimator:
        """Return the estimator for that many samples."""
        limit, neighbours = self.memory_limit_bytes, self.neighbours
        if neighbours is not None:
            return ExactNeighbours(neighbours, samples, limit, resamplings, on_disk=True)
        kernel = resolve_kernel(self.kernel)
        if self.checked_estimator == "exact":
            return Exact(kernel, samples, limit, resamplings, on_disk=True)
        kind: HSICEstimator = "biased" if self.checked_estimator == "biased" else "unbiased"
        return Minibatch(kernel, kind, self.hsic_batch_size, resamplings)


def compare_stored(
    several: Sequence[StoredFeatures],
    pairs: Sequence[tuple[int, int]],
    settings: StoredSettings,
    resamples: Resamples,
) -> tuple[list[CKAResult], list[str]]:
    """Compare pairs of models whose features are stored, in one pass over the files.

    Args:
        several: features of the same samples in the same batches.
        pairs: the positions of the rows' and of the columns' model.
        settings: how they are compared.
        resamples: how samples are resampled.

    Returns:
        The result of each pair, and warnings for the user.

    Raises:
        InputError: if the batches differ.
    """
    sizes = several[0].batch_sizes
    for other in several[1:]:
        if other.batch_sizes != sizes:
            raise InputError(
                f"the stored batches have different sizes: {sizes[:4]} and "
                f"{other.batch_sizes[:4]} samples (the first four batches); save the features of "
                "both from the same loader"
            )
    runs: list[Run] = []
    estimators = []
    for first, second in pairs:
        of_pair = resamples.of_pair(0)
        estimators.append(settings.make_estimator(sum(sizes), of_pair.requested()))
        selections = _selection(several[first].layers), _selection(several[second].layers)
        sides = [_RowsOfFolder(), _RowsOfFolder()]
        runs.append(
            Run(
                sides,
                selections,
                estimators[-1],
                _provenance(several[first], several[second], settings),
                over_ranks=False,
                resamplings=of_pair,
                counting=None,
            )
        )
    scales = [_scales(each) if settings.zscore else {} for each in several]
    with torch.no_grad():
        for number, size in enumerate(sizes):
            if size < estimators[0].min_samples:
                for run in runs:
                    run.skip(size)
                continue
            if settings.checked_estimator == "exact":
                _check_padding(several, number)
            records = [
                _record(each.batch(number), size, estimators[0], scale)
                for each, scale in zip(several, scales, strict=True)
            ]
            for (first, second), run in zip(pairs, runs, strict=True):
                run.add([records[first], records[second]])
        outcomes = [run.outcome() for run in runs]
    messages = dict.fromkeys(message for outcome in outcomes for message in outcome.warnings)
    return [outcome.result for outcome in outcomes], list(messages)


def _check_padding(several: Sequence[StoredFeatures], number: int) -> None:
    """Check that no padding is stored.

    Raises:
        InputError: if some is: it has the mean of its batch, which is not that of all samples.
    """
    for each in several:
        padded = each.padded(number)
        if padded:
            raise InputError(
                f"the features in {each.folder} include padding tokens ({format_labels(padded)}), "
                "which this estimator cannot leave out; use estimator='unbiased', or save the "
                "features again with pooling='mean', 'cls' or 'last'"
            )


def _provenance(
    first: StoredFeatures, second: StoredFeatures, settings: StoredSettings
) -> Provenance:
    return Provenance(
        first.name,
        second.name,
        self_comparison=first.folder == second.folder,
        estimator=settings.checked_estimator,
        kernel=kernel_name(settings.kernel),
        measure="cka" if settings.neighbours is None else settings.neighbours.name,
    )


def _selection(labels: Sequence[str]) -> Selection:
    return Selection({}, {(label, 0): position for position, label in enumerate(labels)})


def _record(
    features: Mapping[str, Tensor], samples: int, estimator: Estimator, scales: Mapping[str, Tensor]
) -> PassRecord[Measurement]:
    """Return the measurements of one batch, each of layers with the same features once."""
    record: PassRecord[Measurement] = PassRecord(samples)
    position_of: dict[int, int] = {}
    for label, rows in features.items():
        known = position_of.get(rows.data_ptr())
        if known is None:
            known = position_of[rows.data_ptr()] = len(record.values)
            wide = rows if label not in scales else rows.float() * scales[label]
            record.values.append(estimator.measure(wide))
        record.rows[Call(label, 0)] = known
    return record


def _scales(features: StoredFeatures) -> dict[str, Tensor]:
    """Return the reciprocal standard deviation (p,) of each feature of each layer; 0 if it is 0."""
    sums: dict[str, list[Tensor]] = {}
    starts: dict[str, Tensor] = {}
    for number in range(len(features.batch_sizes)):
        for label, rows in features.batch(number).items():
            # Differences from the first sample, so that a large offset costs no digits.
            start = starts.setdefault(label, rows[0].double())
            wide = rows.double() - start
            parts = sums.setdefault(label, [torch.zeros_like(start), torch.zeros_like(start)])
            if parts[0].shape != wide[0].shape:
                raise InputError(
                    "zscore=True needs the same number of features in every batch, but the "
                    f'batches of {label!r} differ; save the features again with pooling="mean"'
                )
            parts[0] += wide.sum(0)
            parts[1] += wide.square().sum(0)
    count = len(features)
    scales = {}
    for label, (first, second) in sums.items():
        variance = second / count - (first / count) ** 2
        known = variance > 1e-14 * (second / count)
        scales[label] = torch.where(known, variance.clamp(min=0).rsqrt(), 0).float()
    return scales
