"""Register the hooks that measure, but only in a session that asks for them.

Other sessions import nothing but the declarations of options, markers and the fixture.
"""

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, cast

import pytest

from pytest_cka_memory.core.markers import FIXTURE, MARKERS, SESSION_FIXTURE
from pytest_cka_memory.plugin import are_given, early_device

if TYPE_CHECKING:
    from pytest_cka_memory.plugin.hooks import Hooks
    from pytest_cka_memory.plugin.pytest_private import Node
    from pytest_cka_memory.plugin.reporter import Reporter

_HOOKS = "cka_memory_hooks"


def is_started(config: pytest.Config) -> bool:
    """Whether the hooks that measure are registered."""
    return config.pluginmanager.get_plugin(_HOOKS) is not None


def hooks_of(config: pytest.Config) -> "Hooks":
    """Return the hooks that measure, once they are registered."""
    return cast("Hooks", config.pluginmanager.get_plugin(_HOOKS))


def is_emulated(early_config: pytest.Config) -> bool:
    """Whether the session is to run on an emulated device, which is loaded before torch."""
    return (early_device(early_config) or "").startswith("emulate:")


def is_asked_for(config: pytest.Config) -> bool:
    """Whether an option asks this session to measure, or ranks of torchrun must report together."""
    return are_given(config) or _is_torchrun()


def _is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def asks(item: pytest.Item) -> bool:
    """Whether `item` may have to be measured although no option asks for it."""
    return (
        not {FIXTURE, SESSION_FIXTURE}.isdisjoint(getattr(item, "fixturenames", ()))
        or is_marked(item)
        or bool(item.config.hook.pytest_cka_memory_limits.get_hookimpls())
    )


def is_marked(item: pytest.Item) -> bool:
    """Whether `item` or a node around it has one of our markers."""
    # Called twice for every test of every session, so without the generator item.iter_markers().
    node: Node | None = item
    while node is not None:
        for mark in node.own_markers:
            if mark.name in MARKERS:
                return True
        node = node.parent
    return False


def unregistered_markers(session: pytest.Session) -> set[str]:
    """Return the names of the tests' markers that no plugin and no ini file has registered."""
    nodes: set[Node | None] = set(session.items)
    names: set[str] = set()
    while nodes := nodes - {None}:
        names.update(mark.name for node in nodes if node for mark in node.own_markers)
        nodes = {node.parent for node in nodes if node}
    lines: list[str] = session.config.getini("markers")
    # As pytest reads a line of the ini key "markers": "name(arguments): description".
    return names - {line.partition(":")[0].partition("(")[0].strip() for line in lines}


def start(config: pytest.Config) -> "Reporter | None":
    """Register the hooks that measure; return the reporter, or None in an xdist worker.

    Raises:
        pytest.UsageError: if an option cannot be used.
    """
    _drop_stale_modules()
    from pytest_cka_memory.plugin.pytest_private import plain_imports

    with plain_imports():
        from pytest_cka_memory.core import places
        from pytest_cka_memory.integrations import is_controller, is_worker
        from pytest_cka_memory.plugin import hooks, settings

    named_from_root = ExitStack()
    named_from_root.enter_context(places.root(config.rootpath))
    config.add_cleanup(named_from_root.close)
    config.stash[settings.settings_key] = settings.resolve(config)
    config.pluginmanager.register(hooks.Hooks(config), _HOOKS)
    if config.stash[settings.settings_key].baseline.pruning:
        with plain_imports():
            from pytest_cka_memory.plugin.reporter import record
        record(config)
    if not is_controller(config):
        with plain_imports():
            from pytest_cka_memory.plugin import shared_regions
        shared_regions.collect(config)
    if is_worker(config):
        return None
    reporter = _reporter(config)
    config.pluginmanager.register(reporter, "cka_memory_reporter")
    return reporter


def _reporter(config: pytest.Config) -> "Reporter":
    if _is_torchrun():
        from pytest_cka_memory.plugin import rank_reporter

        return rank_reporter.reporter(config)
    from pytest_cka_memory.plugin.pytest_private import plain_imports

    with plain_imports():
        from pytest_cka_memory.plugin.reporter import Reporter
    return Reporter(config)


def _drop_stale_modules() -> None:
    """Remove modules from their packages that are no longer in ``sys.modules``.

    An in-process session of pytester restores ``sys.modules`` when it ends, but not the attributes
    that its imports have set on packages. Otherwise two copies of a module would be in use.
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
    """Call :func:`start` once tests have been collected and some of them ask for it."""
    reporter = start(session.config)
    if reporter is not None:  # call the hooks that it has missed
        reporter.pytest_sessionstart(session)
        reporter.pytest_collection_finish(session)
    hooks_of(session.config).pytest_collection_finish(session)


def start_late(
    config: pytest.Config, nodeids: Iterable[str], finished: Collection[str] = ()
) -> "Reporter | None":
    """Call :func:`start` while tests already run; `nodeids` are the tests to report on."""
    reporter = start(config)
    if reporter is not None:
        reporter.join(nodeids, finished)
    return reporter


class LateReports:
    """On an xdist controller: waits for the first test report that carries figures."""

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
