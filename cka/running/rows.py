"""The calls of a model's layers that become rows, over all batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from cka.capture.hooks import PassRecord
from cka.capture.layers import Call, format_labels
from cka.capture.outputs import LeftOut, TokenSamples
from cka.errors import InputError


@dataclass
class Rows:
    """The calls of the first batch, and those that some batch does not measure."""

    calls: list[Call] = field(default_factory=list)
    """Calls of the first batch, in order of execution."""
    left_out: dict[Call, LeftOut] = field(default_factory=dict)
    """Calls that cannot be rows, and why: what they returned, or that some batch lacks them."""

    other_tokens: set[Call] = field(default_factory=set)
    """Calls to which the mask of a batch with padding did not apply."""
    not_pooled: set[Call] = field(default_factory=set)
    """Calls to which the pooling did not apply."""

    def positions(self, record: PassRecord[Any]) -> list[int | None]:
        """Return the position of each row's measurement in ``record``; None if a row is missing.

        A row that is missing from a batch is left out of the result.
        """
        self.left_out.update(record.left_out)
        self.other_tokens.update(record.other_tokens)
        self.not_pooled.update(record.not_pooled)
        if not self.calls:
            self.calls = list(record.rows)
        # A call that was left out for a reason of its own keeps that reason.
        for call in set(self.calls).symmetric_difference(record.rows):
            self.left_out.setdefault(call, LeftOut.NOT_IN_EVERY_BATCH)
        return [record.rows.get(call) for call in self.calls]

    def labels_left_out(self, reason: LeftOut) -> list[str]:
        """Return the labels of the calls that are left out for this reason."""
        return [call.label for call in sorted(self.left_out) if self.left_out[call] is reason]

    def to_builtin(self) -> dict[str, Any]:
        """Return the rows as builtin types, for other ranks."""
        return {
            "calls": [list(call) for call in self.calls],
            "left_out": [[*call, self.left_out[call].name] for call in sorted(self.left_out)],
            "other_tokens": [list(call) for call in sorted(self.other_tokens)],
            "not_pooled": [list(call) for call in sorted(self.not_pooled)],
        }

    @classmethod
    def from_builtin(cls, data: dict[str, Any]) -> Rows:
        """Rebuild rows from :meth:`to_builtin`."""
        return cls(
            [Call(*call) for call in data["calls"]],
            {Call(name, number): LeftOut[why] for name, number, why in data["left_out"]},
            {Call(*call) for call in data["other_tokens"]},
            {Call(*call) for call in data["not_pooled"]},
        )


def merge_rows(rows_of_ranks: Sequence[Rows]) -> Rows:
    """Return the rows of all ranks together.

    Args:
        rows_of_ranks: the rows of each rank that had a batch, at least one.

    Raises:
        InputError: if the calls of two ranks differ.
    """
    first = rows_of_ranks[0]
    for rows in rows_of_ranks:
        if rows.calls != first.calls:
            differing = sorted(set(rows.calls).symmetric_difference(first.calls))
            labels = format_labels([call.label for call in differing])
            raise InputError(
                f"the ranks ran different layers, or in another order ({labels or 'same layers'}); "
                "compare the same models and layers on every rank"
            )
    return Rows(
        first.calls,
        {call: why for rows in rows_of_ranks for call, why in rows.left_out.items()},
        set().union(*(rows.other_tokens for rows in rows_of_ranks)),
        set().union(*(rows.not_pooled for rows in rows_of_ranks)),
    )


class RowsOfModel(Protocol):
    """What a comparison needs of one of its models."""

    rows: Rows
    """Its calls, and what was left out."""

    def clear(self) -> None:
        """Drop measurements that are not taken yet."""


def check_same_tokens(of_models: Sequence[TokenSamples | None]) -> None:
    """Check that the tokens of two models, if they are samples, are the same.

    Args:
        of_models: the tokens of each model; None if the samples are those of the batch.

    Raises:
        InputError: if a sample has another number of tokens for one of the models.
    """
    first, last = of_models[0], of_models[-1]
    if first is None or last is None or torch.equal(first.counts, last.counts):
        return
    counts = f"{len(first.index)} and {len(last.index)} tokens"
    if len(first.counts) == len(last.counts):
        at = int((first.counts != last.counts).nonzero()[0])
        counts = f"{int(first.counts[at])} and {int(last.counts[at])} tokens of sample {at}"
    raise InputError(
        f'pooling="tokens" needs the same tokens in both models, which have {counts} of a '
        "batch; select layers with the same tokens, or, if two tokenizers cut the text "
        "differently, align the rows of both with cka.align_tokens and pass them to "
        "cka_from_features"
    )
