"""Warnings of a comparison: what was left out or is NaN, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from cka.capture.layers import format_labels


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
                "CKA is NaN for layers with too few features or samples for "
                'estimator="sampled_neurons", whose corrected HSIC is not positive',
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
