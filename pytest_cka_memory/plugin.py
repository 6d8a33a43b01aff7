"""The hooks of every session, and nothing else; imported by pytest alone.

What measures is in :mod:`pytest_cka_memory.measuring`, loaded when a test or an option asks for it.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory import hookspecs, options, starting, workers
from pytest_cka_memory.names import MARKERS

if TYPE_CHECKING:
    from pytest_cka_memory.probe import MemoryProbe


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for example, text in MARKERS.values():
        config.addinivalue_line("markers", f"{example}: {text}")
    if starting.is_asked_for(config):
        starting.start(config)
    elif workers.is_controller(config):
        config.pluginmanager.register(starting.LateReports(config))


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items[:1]:
        item.config.stash[options.narrowed_key] = True


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly or starting.is_started(session.config):
        return
    if any(map(starting.asks, session.items)):
        starting.start_collected(session)


@pytest.fixture
def cka_memory(request: pytest.FixtureRequest) -> "Iterator[MemoryProbe]":
    """Measure regions of the test: ``with cka_memory.measure() as region: ...``."""
    if not starting.is_started(request.config):  # asked for by name, in a test or another fixture
        starting.start_late(request.config, [request.node.nodeid])
    from pytest_cka_memory import items

    job = items.job_for_fixture(request.node)
    yield job.probe
    job.judge_late_regions()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if starting.is_started(item.config):
        return (yield)
    if starting.is_marked(item):  # by a fixture; else it was known before
        starting.start_late(item.config, [item.nodeid])
        from pytest_cka_memory import measuring

        return (yield from measuring.late_call(item))
    marks = len(item.own_markers)
    result = yield
    if len(item.own_markers) != marks and not starting.is_started(item.config):
        starting.start_late(item.config, [item.nodeid])
    if starting.is_started(item.config):
        from pytest_cka_memory import items

        items.end_unmeasured(item)
    return result
