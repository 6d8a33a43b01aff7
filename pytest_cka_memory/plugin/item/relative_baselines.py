"""Compare a test with another set of its parameters: ``memory_baseline(relative_to="eager")``."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.plugin.pytest_private import parameter_ids

if TYPE_CHECKING:
    from pytest_cka_memory.core.figures import RegionRecord
    from pytest_cka_memory.core.tolerance import Tolerance
    from pytest_cka_memory.core.verdicts import Limit

_figures_key = pytest.StashKey[dict[str, dict[str, dict[str, int | None]]]]()
"""Test -> label -> figures, of the tests with which others are compared."""


def limits_relative_to(
    item: pytest.Item, name: str, text: str, tolerance: "Tolerance", *, required: bool
) -> "list[Limit]":
    """Return the limit on a test that is compared with another; none for that other test itself.

    Args:
        item: the test.
        name: the id of a parameter. The other test has it, and the same other parameters.
        text: the limit as the user writes it.
        tolerance: how far a figure may rise above that of the other test.
        required: whether the limit is broken if there is nothing to compare with.

    Raises:
        LimitError: if there is no such test.
    """
    from pytest_cka_memory.baseline.limit import WithinBaseline

    reference = _reference_of(item, name)
    known = item.config.stash.setdefault(_figures_key, {}).setdefault(reference.nodeid, {})
    if reference is item:
        return []
    return [WithinBaseline(text, tolerance, known, required=required, reference=reference.nodeid)]


def note(item: pytest.Item, records: "Iterable[RegionRecord]") -> None:
    """Keep the figures of a test if others are compared with it."""
    known = item.config.stash.get(_figures_key, {}).get(item.nodeid)
    if known is not None:
        from pytest_cka_memory.core.figures import rounded_figures

        known.update({each.label: rounded_figures(each) for each in records if each.completed})


def _reference_of(item: pytest.Item, name: str) -> pytest.Item:
    ids = parameter_ids(item)
    if name in ids:
        return item
    function = getattr(item, "originalname", item.name)
    for other in item.session.items:
        is_sibling = other.parent is item.parent and getattr(other, "originalname", "") == function
        if is_sibling and _is_replaced_in(ids, name, parameter_ids(other)):
            return other
    raise LimitError(
        f"relative_to={name!r}: no test {function} with this parameter, and otherwise the same "
        "parameters, was collected; write the id of a parameter, and select both tests"
    )


def _is_replaced_in(ids: Sequence[str], name: str, others: Sequence[str]) -> bool:
    """Whether `others` are `ids` with one of them replaced by `name`."""
    if len(ids) != len(others):
        return False
    differing = [other for one, other in zip(ids, others, strict=True) if one != other]
    return differing == [name]
