"""The calls of a model's layers that become rows, over all batches and ranks.

And what users see of them: the progress bar of the batches, and warnings about rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from cka.capture import Call, format_labels
from cka.capture.hooks import PassRecord
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

    @classmethod
    def merged(cls, rows_of_ranks: Sequence[Rows]) -> Rows:
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
                    "the ranks ran different layers, or the same layers in different orders "
                    f"({labels or 'same layers'}); compare the same models and layers on every rank"
                )
        return cls(
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
        'pooling="tokens" needs the same tokens in both models, but in one batch they have '
        f"{counts}; select layers with the same tokens. If two tokenizers cut the text "
        "differently, align the rows of both with cka.align_tokens and pass them to "
        "cka_from_features"
    )


class Progress:
    """A tqdm bar that counts batches. It never gets the batches, so it keeps none alive."""

    def __init__(self, total: int | None, *, shown: bool) -> None:
        """Start the bar.

        Args:
            total: number of batches; None if the loader has no length.
            shown: whether it is visible.
        """
        self._bar = tqdm(total=total, desc="CKA", unit="batch", disable=not shown)
        self._start = time.perf_counter()

    def batch_done(self, samples: int) -> None:
        """Count one batch; ``samples`` is the number of samples in all batches so far."""
        if self._bar.disable:
            return
        rate = samples / max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(f"{samples} samples, {rate:.0f} samples/s", refresh=False)
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()


def nan_warnings(labels: Sequence[Sequence[str]], self_terms: Sequence[Tensor]) -> list[str]:
    """Return warnings about layers whose CKA is NaN: their HSIC with themselves is 0 or NaN.

    Args:
        labels: the labels of the rows, and of the columns.
        self_terms: HSIC of each row with itself, and of each column.
    """
    constant: list[str] = []
    not_finite: list[str] = []
    negative: list[str] = []
    for names, terms in zip(labels, self_terms, strict=True):
        if type(terms) is not Tensor:  # a fake tensor, which has no values
            continue
        for name, term in zip(names, terms.tolist(), strict=True):
            if term == 0:
                constant.append(name)
            elif term < 0:
                negative.append(name)
            elif not math.isfinite(term):
                not_finite.append(name)
    return named_warnings(
        [
            ("CKA is NaN for layers whose output is the same for every sample", constant),
            ("CKA is NaN for layers whose output contains NaN or infinity", not_finite),
            (
                "CKA is NaN for layers with too few features or samples, because "
                'estimator="sampled_neurons" corrects their HSIC to 0 or less',
                negative,
            ),
        ]
    )


def named_warnings(texts: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return each text with its labels, without repeats; drop texts that have none.

    Args:
        texts: texts, each with the labels that it is about.
    """
    return [
        f"{text}: {format_labels(list(dict.fromkeys(names)))}" for text, names in texts if names
    ]
