"""Rows and columns of a result by label, position, slice or list."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from cka.capture.layers import format_labels
from cka.errors import InputError, LayerError


def positions_of(index: Any, labels: Sequence[str], kind: str) -> list[int]:
    """Return the positions of the rows or columns that an index selects.

    Args:
        index: a label, a position, a slice, or a list of labels and positions.
        labels: the labels of all rows or columns.
        kind: "row" or "column", for the messages of errors.

    Raises:
        LayerError: if a label or position does not exist.
        InputError: if the index is of another type.
    """
    if isinstance(index, slice):
        start, stop = index.start, index.stop
        if isinstance(start, str):
            start = _position(start, labels, kind)
        if isinstance(stop, str):
            stop = _position(stop, labels, kind) + 1
        return list(range(len(labels)))[start : stop : index.step]
    if isinstance(index, list):
        return [_position(label, labels, kind) for label in index]
    return [_position(index, labels, kind)]


def _position(index: Any, labels: Sequence[str], kind: str) -> int:
    """Return the position of one row or column, from 0."""
    if isinstance(index, str):
        if index in labels:
            return labels.index(index)
        close = difflib.get_close_matches(index, labels, n=3)
        raise LayerError(
            f"the result has no {kind} {index!r}; "
            + (
                f"did you mean {' or '.join(map(repr, close))}?"
                if close
                else f"it has {format_labels(labels)}"
            )
        )
    if not isinstance(index, int) or isinstance(index, bool):
        raise InputError(
            f"cannot select {kind}s by {index!r}; write a label, a position, a slice or a list, "
            'e.g. result["conv1", "fc"] or result[:, 2:5]'
        )
    if not -len(labels) <= index < len(labels):
        raise LayerError(
            f"{kind} {index} is out of range for a result with {len(labels)} {kind}s; "
            f"write a position from {-len(labels)} to {len(labels) - 1}"
        )
    return index % len(labels)
