"""Refuse markers whose names are nearly ours: pytest only warns, and no limit would apply."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches

import pytest

from pytest_cka_memory.core.markers import MARKERS, NO_ALLOCATIONS
from pytest_cka_memory.integrations import is_worker
from pytest_cka_memory.plugin.pytest_private import fail

_SIMILARITY = 0.8
"""From 0 to 1, as difflib counts it: ``max_peak`` and ``max_peak_mb`` have 0.84."""


def check(session: pytest.Session, unregistered: Collection[str]) -> None:
    """Stop the session if one of the marker names is a misspelled one of ours.

    Args:
        session: its tests have been collected.
        unregistered: the names of markers that no plugin and no ini file has registered.

    Raises:
        pytest.UsageError: with one line for each such name, which names a test. An xdist worker
            cannot stop a session, so there the tests with such markers fail.
    """
    meant = {name: near[0] for name in sorted(unregistered) if (near := _nearest(name))}
    if not meant:
        return
    if is_worker(session.config):
        session.config.pluginmanager.register(_Refusal(meant))
        return
    raise pytest.UsageError(*(_found(session.items, *names) for names in meant.items()))


def _nearest(name: str) -> list[str]:
    return get_close_matches(name.lower(), (*MARKERS, NO_ALLOCATIONS), n=1, cutoff=_SIMILARITY)


def _found(items: Collection[pytest.Item], name: str, meant: str) -> str:
    first, *others = [item.nodeid for item in items if item.get_closest_marker(name) is not None]
    more = f" and {len(others)} more" if others else ""
    return f"{first}{more}: {_message(name, meant)}"


def _message(name: str, meant: str) -> str:
    example = meant if meant == NO_ALLOCATIONS else MARKERS[meant].example
    return (
        f"there is no marker {name!r}; did you mean @pytest.mark.{example}? If "
        f"{name!r} is a marker of your own, add it to the ini key 'markers'"
    )


class _Refusal:
    """Fails every test that has one of the misspelled markers."""

    def __init__(self, meant: Mapping[str, str]) -> None:
        self._meant = meant

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        for name, meant in self._meant.items():
            if item.get_closest_marker(name) is not None:
                message = _message(name, meant)
                fail(f"{item.nodeid}: {message}", message)
