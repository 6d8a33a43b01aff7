"""Hooks that other plugins and conftest files may implement."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_cka_memory.core.verdicts import Result
    from pytest_cka_memory.limits import Limit
    from pytest_cka_memory.meters import Meter


@pytest.hookspec(firstresult=True)
def pytest_cka_memory_meter(config: pytest.Config, device: str) -> "Meter | None":
    """Return the meter for `device` (as the user named it), or None to let others answer.

    It is asked once a process, before the first test is measured. Implement it to measure a
    device the plugin does not know; in plugin tests, return a
    :class:`pytest_cka_memory.testing.ScriptedMeter`.
    """


@pytest.hookspec
def pytest_cka_memory_limits(item: pytest.Item) -> "list[Limit] | None":
    """Return limits for every region of `item`, beside those of its markers, or None.

    It is asked once a test, when tests have been collected; whoever is given a limit is measured.
    Use those of :mod:`pytest_cka_memory.limits`, or a :class:`~pytest_cka_memory.limits.Limit` of
    your own, whose ``judge`` depends on nothing but the record: it is asked several times, at
    batch boundaries too. A limit of the session's options on the same figure gives way to these.
    """


@pytest.hookspec
def pytest_cka_memory_region(item: pytest.Item, result: "Result") -> dict[str, object] | None:
    """Return fields to add to a region, or None; they become its ``extra`` in the JSON report.

    It is called in the process that measured, when the region has been judged, with its figures
    in ``result.record``. Texts, finite numbers, bools, None, lists and dicts can be added.
    """
