"""Messages of a comparison: the progress bar while it runs, and the warnings after it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType

from torch import Tensor
from tqdm.auto import tqdm

from cka.capture.layers import format_labels


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
