"""Loads what measures, once a session asks for it: until then a session pays next to nothing."""

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from pytest_cka_memory.core.markers import FIXTURE, MARKERS
from pytest_cka_memory.plugin import options

if TYPE_CHECKING:
    from _pytest.nodes import Node

    from pytest_cka_memory.plugin.reporter import Reporter

_MEASURING = "cka_memory_measuring"


def is_started(config: pytest.Config) -> bool:
    """Whether what measures is loaded."""
    return bool(config.pluginmanager.has_plugin(_MEASURING))


def is_asked_for(config: pytest.Config) -> bool:
    """Whether this session measures, or must say that it could not, whatever tests it has."""
    return options.are_given(config) or "TORCHELASTIC_RUN_ID" in os.environ  # ranks must meet


def asks(item: pytest.Item) -> bool:
    """Whether `item` may have to be measured though no option says so."""
    return (
        FIXTURE in getattr(item, "fixturenames", ())
        or is_marked(item)
        or bool(item.config.hook.pytest_cka_memory_limits.get_hookimpls())
    )


def is_marked(item: pytest.Item) -> bool:
    """Whether `item` has one of our markers, or a node around it has."""
    # Asked twice for every test there is, so without the generator of item.iter_markers().
    node: Node | None = item
    while node is not None:
        for mark in node.own_markers:
            if mark.name in MARKERS:
                return True
        node = node.parent
    return False


def start(config: pytest.Config) -> "Reporter | None":
    """Load and register all that measures; returns what reports, None in a worker.

    Raises:
        pytest.UsageError: for an option that cannot be used.
    """
    _forget_lost_modules()
    from pytest_cka_memory.integrations import xdist
    from pytest_cka_memory.plugin import hooks, items, settings, torchrun_reporter

    config.stash[items.settings_key] = settings.resolve(config)
    config.pluginmanager.register(hooks, _MEASURING)
    if xdist.is_worker(config):
        return None
    reporter = torchrun_reporter.reporter(config)
    config.pluginmanager.register(reporter, "cka_memory_reporter")
    return reporter


def _forget_lost_modules() -> None:
    """Let modules be found by name alone, so that no two copies of one meet.

    Pytester's sessions within a process put ``sys.modules`` back when they end, and leave the
    attributes that imports have set on a package.
    """
    ours = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "pytest_cka_memory" and hasattr(module, "__path__")
    ]
    for package in ours:
        for name, value in list(vars(package).items()):
            is_module = isinstance(value, ModuleType) and value.__name__.startswith(
                package.__name__
            )
            if is_module and sys.modules.get(value.__name__) is not value:
                delattr(package, name)


def start_collected(session: pytest.Session) -> None:
    """As :func:`start`, when tests have been collected and some of them ask."""
    reporter = start(session.config)
    from pytest_cka_memory.plugin import hooks

    if reporter is not None:  # it missed what was called before, and is called now
        reporter.pytest_sessionstart(session)
        reporter.pytest_collection_finish(session)
    hooks.pytest_collection_finish(session)


def start_late(
    config: pytest.Config, nodeids: Iterable[str], finished: Collection[str] = ()
) -> "Reporter | None":
    """As :func:`start`, while tests already run; `nodeids` are those the report is to know of."""
    reporter = start(config)
    if reporter is not None:
        reporter.join(nodeids, finished)
    return reporter


class LateReports:
    """On the controller of workers: waits for the first report that carries figures."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._collected: dict[str, None] = {}
        self._finished: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._collected |= dict.fromkeys(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if getattr(report, "cka_memory", None) is not None:
            self._config.pluginmanager.unregister(self)
            reporter = start_late(self._config, self._collected, self._finished)
            assert reporter is not None, "a controller reports"
            reporter.pytest_runtest_logreport(report)
        elif report.when == "teardown":
            self._finished.add(report.nodeid)
