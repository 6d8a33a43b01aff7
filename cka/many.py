"""`compare_many`: compares more than two models, such as checkpoints; its results by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import torch
from torch import nn

from cka import plots
from cka.capture import Layers, select
from cka.comparison import CKA
from cka.errors import CKAWarning, InputError, SettingError
from cka.result import CKAResult
from cka.running.model_runner import ComparedModel, check_model
from cka.running.placement import unwrap
from cka.running.run import Resamples
from cka.stored import StoredFeatures
from cka.stored_comparison import StoredSettings, compare_stored, loaded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Key: TypeAlias = str | tuple[str, str]
"""A name, or the names of the rows' and of the columns' model."""


class CKAResults(Mapping[Key, CKAResult]):
    """Results by name, or by pair of names as from :func:`cka.compare_many`, in order.

    >>> model = torch.nn.Linear(8, 4)
    >>> result = CKA(model, device="cpu").compare(torch.randn(2, 32, 8), progress=False)
    >>> results = CKAResults({"before": result, "after": result})
    >>> list(results)
    ['before', 'after']

    ``results["epoch 1", "epoch 2"]`` of ``compare_many`` has the layers of "epoch 1" as rows.
    Results of separate comparisons get names, as above, so that ``results.plot()`` draws them
    together.
    """

    def __init__(self, results: Mapping[Any, CKAResult]) -> None:
        """Keep the results by name, or by pair of names.

        Args:
            results: name, or pair of names -> result, in the order in which they are drawn.
        """
        self._results: dict[Key, CKAResult] = dict(results)

    def __getitem__(self, pair: Key) -> CKAResult:
        """Return the result of a name or pair.

        Raises:
            KeyError: if there is no such result.
        """
        if pair in self._results:
            return self._results[pair]
        shown = ", ".join(map(repr, list(self._results)[:6])) + (", …" if len(self) > 6 else "")
        raise KeyError(f"{pair!r} was not compared; write one of {shown}")

    def __iter__(self) -> Iterator[Key]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def plot(
        self,
        *,
        cmap: str = "magma",
        level: float = 0.05,
        save_path: str | os.PathLike[str] | None = None,
    ) -> Figure:
        """Draw all heat maps side by side with one colour scale, and return the figure.

        Args:
            cmap: name of a matplotlib colour map.
            level: as for :meth:`cka.CKAResult.plot`: which cells of calibrated results get a
                stroke. ``p_best`` is corrected for the pairs of one result.
            save_path: as for :meth:`cka.CKAResult.plot`.

        Raises:
            InputError: if there are no results.
            MissingExtraError: if matplotlib is not installed.
            OSError: if the file cannot be written.
        """
        return plots.heat_maps(self._by_title(), cmap=cmap, level=level, save_path=save_path)

    def plot_best_matches(
        self, *, ax: Axes | None = None, save_path: str | os.PathLike[str] | None = None
    ) -> Axes:
        """Draw the highest CKA of each row with its standard error, one line for each result.

        Args:
            ax: the axes to draw in; None creates a new figure.
            save_path: as for :meth:`cka.CKAResult.plot`.

        Raises:
            InputError: if there are no results, or their rows are different layers.
            MissingExtraError: if matplotlib is not installed.
            OSError: if the file cannot be written.
        """
        return plots.best_match_lines(self._by_title(), ax=ax, save_path=save_path)

    def _by_title(self) -> dict[str, CKAResult]:
        return {
            key if isinstance(key, str) else " and ".join(key): result
            for key, result in self.items()
        }

    def __str__(self) -> str:
        return "\n".join(result.lines()[0] for result in self.values())

    def __repr__(self) -> str:
        return f"<CKAResults: {', '.join(self._by_title())}>"


Pairs: TypeAlias = Literal["all", "first"]


def compare_many(
    models: Mapping[str, nn.Module] | Mapping[str, StoredFeatures | str | os.PathLike[str]],
    dataloader: Iterable[Any] | None = None,
    *,
    layers: Layers = None,
    pairs: Pairs = "all",
    progress: bool = True,
    null: int | None = None,
    bootstrap: int | None = None,
    generator: torch.Generator | None = None,
    **settings: Any,
) -> CKAResults:
    """Compare several models with each other in one pass over the data.

    >>> import torch
    >>> models = {name: torch.nn.Linear(8, 4) for name in ("start", "epoch 1", "epoch 2")}
    >>> results = compare_many(models, torch.randn(4, 32, 8), device="cpu")
    >>> list(results)
    [('start', 'epoch 1'), ('start', 'epoch 2'), ('epoch 1', 'epoch 2')]

    Every model runs once on each batch, and the results equal those of a ``CKA(one, other)`` for
    each pair. All models are on the device during the whole comparison. Of a batch, only the Gram
    matrices are kept, n² numbers for each of the L layers of a model with n samples, and never
    features. The peak is therefore that of the models' weights, one forward pass of the largest
    model, and these matrices: 4 n² L bytes for each model in float32 (8 in float64), or for two
    models only with ``pairs="first"``. The sums of a pair take about 50 L² bytes.

    Models that do not fit together are saved first, each with :func:`cka.save_features`, and their
    folders are compared in one pass over the files.

    Args:
        models: at least two models by name, or instead of them their stored features or folders;
            the names appear in the results.
        dataloader: yields batches for all models, as for :meth:`cka.CKA.compare`; None for stored
            features, which have theirs.
        layers: the layers of every model, as ``model1_layers`` of :class:`cka.CKA`; of stored
            features, all that were saved.
        pairs: "all" compares every model with every later one, "first" compares the first model
            with every other one.
        progress: show a progress bar.
        null: number of permutations for a calibration of every pair, as for
            :meth:`cka.CKA.compare`; ``p_best`` is corrected for the layers of one pair of models.
        bootstrap: number of resamples, by which every pair gets a standard error and an interval,
            as for :meth:`cka.CKA.compare`.
        generator: as for :meth:`cka.CKA.compare`. Every pair uses the same permutations and
            resamples.
        **settings: further settings of :class:`cka.CKA`, such as ``device``, ``kernel``,
            ``pooling`` or ``hsic_batch_size``. The estimator is "unbiased" or "biased". For stored
            features: those of :func:`cka.compare_features`, with its estimators and measures.

    Returns:
        The results by pair of names: ``results["epoch 1", "epoch 2"]``. A CKAWarning names what
        was left out and what is NaN.

    Raises:
        InputError: if there are fewer than two models, or one module has two names; and as
            :meth:`cka.CKA.compare`.
        LayerError: if a layer selection matches nothing, or no layer is left to compare.
        SettingError: if ``pairs`` or a setting is unknown, the estimator is "exact", or ``mask`` is
            a pair.
    """
    if isinstance(models, Mapping) and any(map(_is_stored, models.values())):
        return _of_stored(models, dataloader, layers, pairs, settings, (null, bootstrap, generator))
    modules = cast("Mapping[str, nn.Module]", models)
    _check(modules, pairs, settings)
    if dataloader is None:
        raise InputError(
            "compare_many needs a data loader to compare models; pass dataloader=, or the stored "
            "features of all models"
        )
    comparison = _ComparisonOfMany(modules, layers, settings)
    return comparison.compare_pairs(dataloader, pairs, progress, (null, bootstrap, generator))


def _is_stored(model: Any) -> bool:
    return isinstance(model, (StoredFeatures, str, os.PathLike))


def _of_stored(
    models: Mapping[str, Any],
    dataloader: Any,
    layers: Layers,
    pairs: str,
    settings: Mapping[str, Any],
    resamples: tuple[int | None, int | None, torch.Generator | None],
) -> CKAResults:
    """Compare stored features."""
    others = [name for name, model in models.items() if not _is_stored(model)]
    if others or len(models) < 2:
        raise InputError(
            "compare_many compares either models or the stored features of at least two models, "
            + (
                f"but {others[0]!r} is not stored; save its features with save_features"
                if others
                else "but got the stored features of only one model; add another"
            )
        )
    if dataloader is not None or layers is not None:
        raise InputError(
            "stored features have their own batches and layers; omit dataloader= and layers=, and "
            "choose both when you call save_features"
        )
    _check_pairs(pairs)
    try:
        checked = StoredSettings(**settings)
    except TypeError as error:
        raise SettingError(
            f"compare_many got a setting that it does not accept for stored features: {error}; "
            "use only the settings of compare_features"
        ) from None
    numbers = _numbers(len(models), pairs)
    names = list(models)
    several = [replace(loaded(model), name=name) for name, model in models.items()]
    compared, messages = compare_stored(several, numbers, checked, checked.resamples(*resamples))
    for message in messages:
        warnings.warn(message, CKAWarning, stacklevel=3)
    return CKAResults(
        {
            (names[first], names[second]): result
            for (first, second), result in zip(numbers, compared, strict=True)
        }
    )


def _numbers(models: int, pairs: str) -> list[tuple[int, int]]:
    """Return the pairs that are compared, by position."""
    every = combinations(range(models), 2)
    return [(first, second) for first, second in every if pairs == "all" or first == 0]


class _ComparisonOfMany(CKA):
    """A CKA with more than two models; the settings are checked by CKA."""

    def __init__(
        self, models: Mapping[str, nn.Module], layers: Layers, settings: Mapping[str, Any]
    ) -> None:
        # CKA checks the settings, and needs two models for that; all of them are in _compared.
        (name1, model1), (name2, model2), *_ = models.items()
        super().__init__(
            model1, model2, layers, layers, model1_name=name1, model2_name=name2, **settings
        )
        inner = {name: unwrap(model) for name, model in models.items()}
        self._compared = [
            ComparedModel(module, select(module, layers), name) for name, module in inner.items()
        ]

    def compare_pairs(
        self,
        dataloader: Iterable[Any],
        pairs: Pairs,
        progress: bool,
        requested: tuple[int | None, int | None, torch.Generator | None],
    ) -> CKAResults:
        self._reader.check_resamples(*requested[:2])
        resamples = Resamples.checked(*requested, self._estimator)
        models = self._compared
        numbers = _numbers(len(models), pairs)
        outcomes = self._run(models, numbers, (dataloader,), progress, resamples, stacklevel=4)
        messages = dict.fromkeys(message for outcome in outcomes for message in outcome.warnings)
        for message in messages:
            warnings.warn(message, CKAWarning, stacklevel=3)
        return CKAResults(
            {
                (models[first].name, models[second].name): outcome.result
                for (first, second), outcome in zip(numbers, outcomes, strict=True)
            }
        )


def _check_pairs(pairs: str) -> None:
    if pairs not in get_args(Pairs):
        raise SettingError(f"cannot use {pairs!r} as pairs; write 'all' or 'first'")


def _check(models: Mapping[str, nn.Module], pairs: str, settings: Mapping[str, Any]) -> None:
    if not isinstance(models, Mapping) or len(models) < 2:
        what = f"{len(models)}" if isinstance(models, Mapping) else type(models).__name__
        raise InputError(
            f"compare_many needs a mapping of at least two models, got {what}; "
            'write e.g. {"epoch 1": model1, "epoch 2": model2}'
        )
    _check_pairs(pairs)
    if settings.get("measure", "cka") != "cka":
        raise SettingError(
            "compare_many keeps only Gram matrices of batches, but "
            f"measure={settings['measure']!r} needs the features of all samples; use CKA(one, "
            "other, measure=...) for each pair, or call save_features for each model"
        )
    if settings.get("estimator") == "exact":
        raise SettingError(
            "compare_many keeps only Gram matrices of batches, but estimator='exact' needs the "
            "features of all samples; use 'unbiased', or CKA(one, other, estimator='exact') for "
            "each pair, or call save_features for each model"
        )
    if isinstance(settings.get("mask"), tuple):
        raise SettingError(
            f"compare_many uses one mask for all models, got a pair: {settings['mask']!r}; "
            "pass one name or function, or compare the models in pairs with CKA"
        )
    names: dict[nn.Module, str] = {}
    for name, model in models.items():
        check_model(model, f"models[{name!r}]")
        other = names.setdefault(unwrap(model), name)
        if other != name:
            raise InputError(
                f"{other!r} and {name!r} are the same module, so they have the same weights; load "
                "each checkpoint into its own model, e.g. a copy.deepcopy of the first"
            )
