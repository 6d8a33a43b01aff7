"""The result of a comparison: matrices on the CPU, and their output as text, table, plot, file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from cka import plots
from cka.capture import positions_of
from cka.errors import InputError
from cka.functional.distributions import Calibration, Confidence
from cka.functional.sums import Sums, cka_with_error, merge_sums, select_sums
from cka.result_file import read_fields, write_fields

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


Index: TypeAlias = int | str | slice | Sequence[int | str]
"""Rows or columns: a label, a position, a slice of labels or positions, or a list of these."""

Figures = TypeVar("Figures", Calibration, Confidence)


_TITLES = {"cka": "CKA", "mutual_knn": "mutual kNN", "cknna": "CKNNA"}


class Match(NamedTuple):
    """A layer of the first model, and the layer of the second model that is most similar to it.

    >>> print(Match("conv1", "conv2", 0.91234, 0.0123))
    conv1 → conv2: 0.9123 ± 0.0123
    """

    layer: str
    """Label of the row."""
    match: str
    """Label of the column with the highest CKA in this row."""
    value: float
    """CKA of the two layers."""
    standard_error: float
    """Standard error of ``value``; NaN for fewer than two batches."""

    def __str__(self) -> str:
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.4f}"
        return f"{self.layer} → {self.match}: {self.value:.4f}{error}"


@dataclass(frozen=True, eq=False)
class CKAResult:
    """CKA between the layers of two models.

    >>> from cka import CKA
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
    >>> result = CKA(model, device="cpu").compare(torch.randn(2, 64, 8), progress=False)
    >>> result.matrix.shape, result.model1_layers, result.samples
    (torch.Size([2, 2]), ['0', '1'], 128)
    >>> print(f"{result['0', '1']:.2f}")
    0.90
    >>> [match.layer for match in result.best_matches()]
    ['0', '1']
    """

    matrix: Tensor
    """CKA, (L1, L2), on the CPU: float32, or float64 for float64 models. It is NaN if the output
    of a layer is the same for every sample."""
    standard_error: Tensor
    """Jackknife standard error over batches, (L1, L2), on the CPU; NaN for fewer than two batches.

    It estimates how much CKA would vary with other batches of the same data: two values that differ
    by less than about two of their standard errors may be equal. For few batches it is unreliable;
    ``confidence`` is better. It does not estimate what CKA would be by chance. That is 0 for
    unbiased estimates, so one that is more than two standard errors above 0 is probably above
    chance. For biased estimates it can be close to 1; ``calibration`` has it for every pair, and
    :func:`cka.null_distribution` for the features of two layers, both with p-values that need no
    assumption about the distribution of CKA."""
    model1_layers: list[str]
    """Labels of the L1 rows; the second call of ``relu`` is ``relu:1``."""
    model2_layers: list[str]
    """Labels of the L2 columns."""
    model1_name: str
    """Name of the first model."""
    model2_name: str
    """Name of the second model."""
    samples: int
    """Number of samples used."""
    batches: int
    """Number of batches used."""
    estimator: str
    """``"unbiased"``, ``"biased"``, ``"exact"`` or ``"sampled_neurons"``."""
    kernel: str
    """Name of the kernel."""
    self_comparison: bool
    """Whether one model was compared with itself on the same data."""
    measure: str = "cka"
    """``"cka"``, ``"mutual_knn"`` or ``"cknna"``."""
    calibration: Calibration | None = None
    """z and p-values by permutations of the samples; None without ``null`` in ``compare``."""
    sums: Sums | None = field(default=None, repr=False)
    """Sums over batches, by which results of further batches can be added; None for estimates from
    all samples at once."""
    confidence: Confidence | None = None
    """Standard errors and intervals by resamples; None without ``bootstrap`` in ``compare``."""

    @overload
    def __getitem__(  # type: ignore[overload-overlap]  # a pair is a number, as documented
        self, key: tuple[int | str, int | str]
    ) -> float: ...

    @overload
    def __getitem__(self, key: Index | tuple[Index, Index]) -> CKAResult: ...

    def __getitem__(self, key: Any) -> float | CKAResult:
        """Return the CKA of two layers, or a part of the result.

        ``result["conv1", "layer1"]`` is a number, NaN included. With a slice or a list, or with
        rows only, it is a CKAResult: ``result["conv1"]``, ``result[:, 2:5]``,
        ``result[["conv1", "fc"], :]``. As in pandas, a slice of labels contains its last label:
        ``result["layer1.0":"layer1.1"]``. Labels are taken literally, not as globs.

        Args:
            key: rows, or a pair of rows and columns, each by label, position, slice or list.

        Raises:
            LayerError: if a label or position does not exist.
            InputError: if the index is of another type.
        """
        row, column = key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))
        rows = positions_of(row, self.model1_layers, "row")
        columns = positions_of(column, self.model2_layers, "column")
        if isinstance(row, (int, str)) and isinstance(column, (int, str)):
            return float(self.matrix[rows[0], columns[0]])
        of_part = self.sums
        if of_part is not None:
            of_part = select_sums(
                of_part,
                torch.tensor(rows, dtype=torch.long, device="cpu"),
                torch.tensor(columns, dtype=torch.long, device="cpu"),
            )
        return replace(
            self,
            sums=of_part,
            matrix=self.matrix[rows][:, columns],
            standard_error=self.standard_error[rows][:, columns],
            calibration=_part(self.calibration, rows, columns),
            confidence=_part(self.confidence, rows, columns),
            model1_layers=[self.model1_layers[at] for at in rows],
            model2_layers=[self.model2_layers[at] for at in columns],
        )

    def __add__(self, other: CKAResult) -> CKAResult:
        """Return the result of the batches of both, as if one comparison had run on all of them.

        So a comparison can go on with further batches: ``CKAResult.load(path) + cka.compare(rest)``
        is what a comparison of all batches would be, but without ``calibration`` and
        ``confidence``.

        >>> from cka import CKA
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
        >>> first, second = torch.randn(2, 3, 64, 8)
        >>> cka = CKA(model, device="cpu")
        >>> both = cka.compare(first, progress=False) + cka.compare(second, progress=False)
        >>> both.batches, both.samples
        (6, 384)

        Raises:
            InputError: if the results are of other layers, settings or models, or are estimates
                from all samples at once.
        """
        if not isinstance(other, CKAResult):
            return NotImplemented
        for name in ("measure", "estimator", "kernel", "model1_layers", "model2_layers"):
            if getattr(self, name) != getattr(other, name):
                raise InputError(
                    f"results that differ in {name} cannot be added: {getattr(self, name)!r} and "
                    f"{getattr(other, name)!r}; compare the same layers with the same settings"
                )
        if self.sums is None or other.sums is None:
            raise InputError(
                "cannot add results that do not contain their sums over batches, because of "
                f"estimator={self.estimator!r} or an incomplete file; compare again with "
                "estimator='unbiased'"
            )
        sums = merge_sums(self.sums, other.sums)
        matrix, error = cka_with_error(sums)
        dtype = self.matrix.dtype
        return replace(
            self,
            matrix=matrix.to(dtype),
            standard_error=error.to(dtype),
            samples=self.samples + other.samples,
            batches=self.batches + other.batches,
            self_comparison=self.self_comparison and other.self_comparison,
            sums=sums,
            calibration=None,
            confidence=None,
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the matrix for ``numpy.asarray(result)``, (L1, L2)."""
        array = self.matrix.numpy()
        if dtype is not None:
            array = array.astype(dtype, copy=False)
        return array.copy() if copy else array

    # Python would otherwise iterate by result[0], result[1], ... until an IndexError.
    __iter__ = None

    def best_matches(self) -> list[Match]:
        """Return the most similar column of each row, without rows in which all values are NaN.

        In a self-comparison, a layer is not matched with itself.

        Returns:
            One :class:`~cka.Match` for each such row, in the order of the rows.
        """
        values = self.matrix.double().nan_to_num(-math.inf)
        if self.self_comparison:
            for row, layer in enumerate(self.model1_layers):
                for column, other in enumerate(self.model2_layers):
                    if layer == other:
                        values[row, column] = -math.inf
        matches = []
        for row, layer in enumerate(self.model1_layers):
            column = int(values[row].argmax())
            if values[row, column] > -math.inf:
                error = float(self.standard_error[row, column])
                value = float(self.matrix[row, column])
                matches.append(Match(layer, self.model2_layers[column], value, error))
        return matches

    @property
    def title(self) -> str:
        """Name of the measure, as it is written: CKA, mutual kNN or CKNNA."""
        return _TITLES.get(self.measure, self.measure)

    def lines(self) -> list[str]:
        """Return the result as text: a heading, and one line for each best match."""
        heading = (
            f"{self.title} of {self.model1_name} ({len(self.model1_layers)} layers) and "
            f"{self.model2_name} ({len(self.model2_layers)} layers): {self.samples} samples in "
            f"{self.batches} {'batch' if self.batches == 1 else 'batches'}, "
            f"{self.estimator}" + (f", {self.kernel} kernel" if self.measure == "cka" else "")
        )
        for figures in (self.calibration, self.confidence):
            if figures is not None:
                heading += f"; {figures}"
        return [heading, *(f"  {match}" for match in self.best_matches())]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<CKAResult: {self.lines()[0]}>"

    def to_dataframe(self, *, long: bool | None = None) -> pd.DataFrame:
        """Return the result as a DataFrame with layer labels; its axes have the models' names.

        Args:
            long: False returns the matrix. True returns one row for each pair of layers, with the
                columns ``cka`` and ``standard_error``; ``z``, ``p`` and ``p_best`` if the result
                is calibrated; and ``low``, ``high`` and ``bootstrap_error`` if it has a bootstrap.
                None (default) is True if it has either, False otherwise.

        Returns:
            L1 rows and L2 columns, or L1 × L2 rows if it is long.

        Raises:
            MissingExtraError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise plots.missing_extra("pandas", "to_dataframe()") from error
        resampled = self.calibration is not None or self.confidence is not None
        if long or (long is None and resampled):
            columns = self._columns()
            pairs = pd.MultiIndex.from_product(
                [self.model1_layers, self.model2_layers], names=[self.model1_name, self.model2_name]
            )
            table: pd.DataFrame = pd.DataFrame(
                {name: values.flatten().numpy() for name, values in columns.items()}, index=pairs
            )
            return table
        frame: pd.DataFrame = pd.DataFrame(
            self.matrix.numpy(),
            index=pd.Index(self.model1_layers, name=self.model1_name),
            columns=pd.Index(self.model2_layers, name=self.model2_name),
        )
        return frame

    def to_xarray(self) -> Any:
        """Return the result as an xarray Dataset, with the layers as coordinates.

        Its variables are the matrix, under the name of the measure, ``standard_error``, and, if the
        result has them, ``z``, ``p``, ``p_best``, ``low``, ``high`` and ``bootstrap_error``.

        Returns:
            The Dataset, with the dimensions ``model1_layer`` (L1) and ``model2_layer`` (L2).

        Raises:
            MissingExtraError: if xarray is not installed.
        """
        try:
            import xarray  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise plots.missing_extra("xarray", "to_xarray()") from error
        # The models may have the same name, but dimensions may not.
        axes = ("model1_layer", "model2_layer")
        return xarray.Dataset(
            {name: (axes, values.numpy()) for name, values in self._columns().items()},
            {axes[0]: self.model1_layers, axes[1]: self.model2_layers},
            {
                name: getattr(self, name)
                for name in ("model1_name", "model2_name", "samples", "batches", "estimator",
                             "kernel", "measure")
            },
        )  # fmt: skip

    def _columns(self) -> dict[str, Tensor]:
        """Return all matrices of the result by name."""
        columns = {self.measure: self.matrix, "standard_error": self.standard_error}
        if self.calibration is not None:
            columns |= {name: getattr(self.calibration, name) for name in ("z", "p", "p_best")}
        if self.confidence is not None:
            columns |= {name: getattr(self.confidence, name) for name in ("low", "high")}
            columns["bootstrap_error"] = self.confidence.standard_error
        return columns

    def plot(
        self,
        *,
        ax: Axes | None = None,
        cmap: str = "magma",
        level: float = 0.05,
        save_path: str | os.PathLike[str] | None = None,
    ) -> Axes:
        """Draw a heat map and return its axes: first model vertical, second model horizontal.

        If the result is calibrated, a stroke marks cells that are not significant: those whose
        ``p_best`` is above ``level``.

        Args:
            ax: the axes to draw in; None creates a new figure in which every layer is labelled. In
                smaller axes, every second, third, … layer is.
            cmap: name of a matplotlib colour map.
            level: probability that a cell without a stroke is there by chance, at most, if the
                layers of all pairs are unrelated. With N permutations no p-value is below
                1 / (1 + N), so with too few of them all cells have a stroke.
            save_path: write the figure to this file, in the format of its suffix (.png, .pdf,
                .svg). A new figure is then not shown.

        Raises:
            MissingExtraError: if matplotlib is not installed.
            OSError: if the file cannot be written.
        """
        return plots.heat_map(self, ax=ax, cmap=cmap, level=level, save_path=save_path)

    def plot_best_matches(
        self, *, ax: Axes | None = None, save_path: str | os.PathLike[str] | None = None
    ) -> Axes:
        """Draw a line of the highest CKA of each row with its standard error, and the match's name.

        Args:
            ax: the axes to draw in; None creates a new figure.
            save_path: as for :meth:`plot`.

        Raises:
            MissingExtraError: if matplotlib is not installed.
            OSError: if the file cannot be written.
        """
        return plots.best_match_lines({self.model2_name: self}, ax=ax, save_path=save_path)

    def plot_difference(
        self,
        other: CKAResult,
        *,
        ax: Axes | None = None,
        cmap: str = "RdBu_r",
        save_path: str | os.PathLike[str] | None = None,
    ) -> Axes:
        """Draw this matrix minus that of ``other`` as a heat map, with zero in the middle colour.

        Args:
            other: a result with the same layers, e.g. of a later checkpoint.
            ax: the axes to draw in; None creates a new figure.
            cmap: name of a diverging matplotlib colour map.
            save_path: as for :meth:`plot`.

        Raises:
            InputError: if the results have different layers.
            MissingExtraError: if matplotlib is not installed.
            OSError: if the file cannot be written.
        """
        return plots.difference_map(self, other, ax=ax, cmap=cmap, save_path=save_path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result to a JSON file, with NaN as null.

        The file is written under a temporary name and then renamed, so a failed write leaves no
        partial file.

        Args:
            path: the file, which is replaced if it exists.

        Raises:
            OSError: if the file cannot be written.
        """
        write_fields(Path(path), {name: getattr(self, name) for name in self.__dataclass_fields__})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CKAResult:
        """Read a file written by :meth:`save`. The file contains no code.

        Args:
            path: the file.

        Raises:
            InputError: if the file is not a saved result.
            OSError: if the file cannot be read.
        """
        try:
            return cls(**read_fields(Path(path)))
        except TypeError as error:  # a name that is not a field
            raise InputError(
                f"{path} is not a result in the format of this version; pass a file written by "
                "CKAResult.save"
            ) from error


def _part(figures: Figures | None, rows: list[int], columns: list[int]) -> Figures | None:
    """Return the calibration or confidence of some rows and columns."""
    if figures is None:
        return None
    matrices: dict[str, Any] = {
        name: figure[rows][:, columns]
        for name, figure in vars(figures).items()
        if isinstance(figure, Tensor)
    }
    return replace(figures, **matrices)
