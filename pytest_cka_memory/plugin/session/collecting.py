"""Record which files and folders were collected completely, for ``--cka-memory-prune-baseline``.

Tests are recorded before pytest deselects any. A file that was named as ``file.py::test``, failed
to be imported, was skipped or was ignored is not recorded as complete.
"""

from typing import Any

import pytest

from pytest_cka_memory.core.collection import Collection, file_of, merged
from pytest_cka_memory.integrations import xdist

_OUTPUT = "cka_memory_collection"
"""The key under which a worker of pytest-xdist sends its record to the controller."""


class CollectionRecorder:
    """Records the collection of this process or, on a controller, of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: set[str] = set()
        self._passed: set[str] = set()
        self._incomplete: set[str] = set()
        self._of_workers: list[Collection] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._tests.add(item.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed:
            self._passed.add(report.nodeid)
        else:  # a class of the file, or all of it
            self._incomplete.add(file_of(report.nodeid))

    def pytest_sessionfinish(self) -> None:
        if xdist.is_worker(self._config):
            own = self.collection()
            output: dict[str, Any] = self._config.workeroutput  # type: ignore[attr-defined]
            output[_OUTPUT] = sorted(own.tests), sorted(own.complete)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        sent = getattr(node, "workeroutput", {}).get(_OUTPUT)
        if sent is not None:  # None if the worker has died
            self._of_workers.append(Collection(*map(frozenset, sent)))

    def collection(self) -> Collection:
        """Return what has been recorded so far."""
        if xdist.is_controller(self._config):
            return merged(self._of_workers)
        # --last-failed leaves tests out while it collects, without a word.
        complete = set() if self._config.getoption("lf", False) else self._passed - self._incomplete
        return Collection(frozenset(self._tests), frozenset(complete))


_recorder_key = pytest.StashKey[CollectionRecorder]()


def record(config: pytest.Config) -> None:
    """Record the collection of this session from now on."""
    recorder = config.stash[_recorder_key] = CollectionRecorder(config)
    config.pluginmanager.register(recorder, "cka_memory_collection")


def collection_of(config: pytest.Config) -> Collection:
    """Return what was recorded; nothing if nobody asked for it."""
    recorder = config.stash.get(_recorder_key, None)
    return Collection() if recorder is None else recorder.collection()
