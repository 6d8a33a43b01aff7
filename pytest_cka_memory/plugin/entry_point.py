"""The hooks that every session has; pytest imports this module, nothing else does.

The hooks that measure are in :mod:`pytest_cka_memory.plugin.hooks`, imported when a test or
an option asks for it.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory import hookspecs
from pytest_cka_memory.core.markers import MARKERS, NO_ALLOCATIONS, NO_ALLOCATIONS_HELP
from pytest_cka_memory.integrations import is_controller
from pytest_cka_memory.plugin import (
    activation,
    add_options,
    narrowed_key,
    refuse_unknown_keys,
    written_reports,
)

if TYPE_CHECKING:
    from pytest_cka_memory.measure.probe import MemoryProbe


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    config: pytest.Config | None = pluginmanager.get_plugin("pytestconfig")
    add_options(parser, written_reports(config) if config else ())


# Before conftest files, because they may import torch, which looks for a device only once.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if activation.is_emulated(early_config):
        from pytest_cka_memory.plugin.device import load_emulated_device

        load_emulated_device(early_config)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS.values():
        config.addinivalue_line("markers", f"{marker.example}: {marker.help}")
    config.addinivalue_line("markers", f"{NO_ALLOCATIONS}: {NO_ALLOCATIONS_HELP}")
    refuse_unknown_keys(config)
    if activation.is_asked_for(config):
        activation.start(config)
    elif is_controller(config):
        config.pluginmanager.register(activation.LateReports(config))


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items[:1]:
        item.config.stash[narrowed_key] = True


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    if unregistered := activation.unregistered_markers(session):
        from pytest_cka_memory.plugin import marker_names

        marker_names.check(session, unregistered)
    if not activation.is_started(session.config) and any(map(activation.asks, session.items)):
        activation.start_collected(session)


@pytest.fixture
def cka_memory(request: pytest.FixtureRequest) -> "Iterator[MemoryProbe]":
    """Measure regions of the test: ``with cka_memory.measure() as region: ...``."""
    if not activation.is_started(request.config):  # by request.getfixturevalue()
        activation.start_late(request.config, [request.node.nodeid])
    from pytest_cka_memory.plugin.judging import judge_for_fixture

    judge = judge_for_fixture(request.node)
    yield judge.probe
    judge.judge_late_regions()


@pytest.fixture(scope="session")
def cka_memory_session(request: pytest.FixtureRequest) -> "Iterator[MemoryProbe]":
    """Measure regions in fixtures of any scope, such as one that builds a model."""
    if not activation.is_started(request.config):  # by request.getfixturevalue()
        activation.start_late(request.config, [])
    from pytest_cka_memory.plugin.shared_regions import regions_of

    regions = regions_of(request.config)
    yield regions.session_probe()
    regions.end_session_probe()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if activation.is_started(item.config):
        return (yield)
    if activation.is_marked(item):  # by a fixture, after collection
        activation.start_late(item.config, [item.nodeid])
        return (yield from activation.hooks_of(item.config).late_call(item))
    marks = len(item.own_markers)
    result = yield
    if len(item.own_markers) != marks and not activation.is_started(item.config):
        activation.start_late(item.config, [item.nodeid])
    if activation.is_started(item.config):
        from pytest_cka_memory.plugin.measurement import end_unmeasured

        end_unmeasured(item)
    return result
