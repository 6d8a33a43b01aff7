"""The results of several pairs of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cka.result import CKAResult

Pair = tuple[str, str]


class CKAResults(Mapping[Pair, CKAResult]):
    """The results of :func:`cka.compare_many`: pairs of names -> CKAResult, in order.

    ``results["epoch 1", "epoch 2"]`` has the layers of "epoch 1" as rows.
    """

    def __init__(self, results: Mapping[Pair, CKAResult]) -> None:
        """Keep the results by pair of names: those of the rows' and of the columns' model."""
        self._results = dict(results)

    def __getitem__(self, pair: Pair) -> CKAResult:
        """Return the result of a pair.

        Raises:
            KeyError: if the pair was not compared.
        """
        if pair in self._results:
            return self._results[pair]
        shown = ", ".join(map(repr, list(self._results)[:6])) + (", …" if len(self) > 6 else "")
        raise KeyError(f"{pair!r} was not compared; write one of the pairs {shown}")

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def __str__(self) -> str:
        return "\n".join(result.lines()[0] for result in self.values())

    def __repr__(self) -> str:
        return f"<CKAResults: {', '.join(f'{one} and {other}' for one, other in self)}>"
