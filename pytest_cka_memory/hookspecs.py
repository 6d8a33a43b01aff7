"""Hooks that other plugins and conftest files may implement."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_cka_memory.core.verdicts import Limit, Result
    from pytest_cka_memory.meters.base import Meter


@pytest.hookspec(firstresult=True)
def pytest_cka_memory_meter(config: pytest.Config, device: str) -> "Meter | None":
    """Return the meter for `device` (as the user named it), or None to let other plugins decide.

    It is called once per process, before the first test is measured. Implement it to measure a
    device that the plugin does not know; in plugin tests, return a
    :class:`pytest_cka_memory.testing.ScriptedMeter`.

    Args:
        config: the configuration of the session.
        device: as ``--cka-memory-device`` was given, such as ``"auto"`` or ``"tpu:1"``.

    Returns:
        A :class:`~pytest_cka_memory.meters.Meter` that is not started; None for a device that this
        plugin does not know either. The first meter that is returned is used.

    Example:
        .. code-block:: python

            def pytest_cka_memory_meter(device):
                return MyMeter(device) if device.startswith("tpu") else None
    """


@pytest.hookspec
def pytest_cka_memory_limits(item: pytest.Item) -> "list[Limit] | None":
    """Return limits for every region of `item`, in addition to its markers', or None.

    It is called once per test, after collection; a test that gets a limit is measured. Return
    limits of :mod:`pytest_cka_memory.limits`, or your own subclass of
    :class:`~pytest_cka_memory.limits.Limit`. Its ``judge`` must depend only on the record, because
    it is called several times, also at batch boundaries. These limits replace those that the
    session's options set on the same figure.

    Args:
        item: the test.

    Returns:
        The limits; None or an empty list for a test that gets none.

    Example:
        .. code-block:: python

            from pytest_cka_memory.limits import max_peak_mb

            def pytest_cka_memory_limits(item):
                if item.path.name == "test_serving.py":
                    return [max_peak_mb("2 GiB")]
    """


@pytest.hookspec
def pytest_cka_memory_region(item: pytest.Item, result: "Result") -> dict[str, object] | None:
    """Return fields to add to a region, or None; they become its ``extra`` in the JSON report.

    It is called in the process that measured, after the region has been judged; its figures are
    in ``result.record``. Fields may be texts, finite numbers, bools, None, lists and dicts.

    Args:
        item: the test.
        result: the region with its figures, in bytes, and its verdicts.

    Returns:
        Name -> value of each field; None for no field. Two plugins must not add the same name.

    Example:
        .. code-block:: python

            def pytest_cka_memory_region(item, result):
                return {"owner": "team-a", "peak_gb": result.record.peak_bytes / 2**30}
    """
