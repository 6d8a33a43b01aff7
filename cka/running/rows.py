"""The calls of a model's layers that become the rows (or columns) of a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cka.capture.hooks import PassRecord
from cka.capture.layers import Call, format_labels
from cka.errors import InputError


@dataclass
class Rows:
    """The calls of the first batch, and those that some batch does not measure."""

    calls: list[Call] = field(default_factory=list)
    """Calls of the first batch, in order of execution."""
    not_in_every_batch: set[Call] = field(default_factory=set)
    """Calls that ran in some batches but not in all."""
    without_batch: set[Call] = field(default_factory=set)
    """Calls whose output had no tensor with the batch in its first dimension at least once."""

    def positions(self, record: PassRecord[Any]) -> list[int]:
        """Return the position of each row's measurement in ``record``; 0 if a row is missing.

        A row that is missing from a batch is excluded from the result, so its sums do not matter.
        """
        self.without_batch.update(record.without_batch)
        if not self.calls:
            self.calls = list(record.rows)
        differing = set(self.calls).symmetric_difference(record.rows)
        self.not_in_every_batch.update(differing - self.without_batch)
        return [record.rows.get(call, 0) for call in self.calls]

    def to_builtin(self) -> dict[str, Any]:
        """Return the rows as builtin types, for other ranks."""
        return {
            "calls": [list(call) for call in self.calls],
            "not_in_every_batch": [list(call) for call in sorted(self.not_in_every_batch)],
            "without_batch": [list(call) for call in sorted(self.without_batch)],
        }

    @classmethod
    def from_builtin(cls, data: dict[str, Any]) -> Rows:
        """Rebuild rows from :meth:`to_builtin`."""
        return cls(
            [Call(*call) for call in data["calls"]],
            {Call(*call) for call in data["not_in_every_batch"]},
            {Call(*call) for call in data["without_batch"]},
        )

    def excluded(self) -> set[Call]:
        """Return the calls that cannot be rows."""
        return self.not_in_every_batch | self.without_batch


def merge_rows(rows_of_ranks: Sequence[Rows]) -> Rows:
    """Return the rows of all ranks together.

    Raises:
        InputError: if the calls of two ranks differ.
    """
    first = rows_of_ranks[0]
    for one in rows_of_ranks:
        if one.calls != first.calls:
            differing = sorted(set(one.calls).symmetric_difference(first.calls))
            labels = format_labels([call.label for call in differing])
            raise InputError(
                f"the ranks ran different layers, or in another order ({labels or 'same layers'}); "
                "compare the same models and layers on every rank"
            )
    return Rows(
        first.calls,
        set().union(*(one.not_in_every_batch for one in rows_of_ranks)),
        set().union(*(one.without_batch for one in rows_of_ranks)),
    )
