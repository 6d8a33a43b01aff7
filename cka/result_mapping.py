"""Several results by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from cka import plots
from cka.result import CKAResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Key: TypeAlias = str | tuple[str, str]
"""A name, or the names of the rows' and of the columns' model."""


class CKAResults(Mapping[Key, CKAResult]):
    """Several results, in order: those of :func:`cka.compare_many` by pair of names, or any.

    ``results["epoch 1", "epoch 2"]`` of ``compare_many`` has the layers of "epoch 1" as rows. To
    plot results of separate comparisons together, name them:
    ``CKAResults({"epoch 1": result1, "epoch 2": result2}).plot()``.
    """

    def __init__(self, results: Mapping[Any, CKAResult]) -> None:
        """Keep the results by name, or by pair of names."""
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
