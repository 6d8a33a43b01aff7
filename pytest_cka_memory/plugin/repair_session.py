"""A plugin for ``pytest -p``: run each test again and again, under changes that may lower its peak.

``python -m pytest_cka_memory repair`` starts sessions with it. What to do is in the environment
variable :data:`VARIABLE`, and what was found is written to the file that it names.
"""

import gc
import json
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.markers import MARKERS
from pytest_cka_memory.plugin.pytest_private import run_again, without_capture

if TYPE_CHECKING:
    from pytest_cka_memory.repair.trials import Trial

VARIABLE = "PYTEST_CKA_MEMORY_REPAIR"
SEARCH, MEASURE, VALUES = "search", "measure", "values"
"""What a session does with each test: try changes, measure it as it is, or keep its gradients."""


@dataclass(frozen=True)
class Task:
    """What a session is asked for."""

    result: str
    """The file for what was found; with :data:`VALUES`, also the start of the names of others."""
    mode: str = SEARCH
    budget_bytes: int | None = None
    seconds: float | None = None
    goes_on: bool = True
    """Whether changes are tried if the test runs out of memory as it is."""
    draws: bool = False
    """Whether the memory over time is kept, before and after the recommended changes."""
    sizes: tuple[tuple[int, int], tuple[int, int]] | None = None
    """The batch and the tokens of the test, and smaller ones instead; None to keep them."""
    label: str = ""
    """What is run, if it is not a test of the user; otherwise tests have their own names."""
    also: tuple[str, ...] = ()
    """Names of further changes to say how to write."""
    ranks: int = 1
    """How many processes run it under torchrun; each has a result of its own."""

    def result_of(self, rank: int) -> str:
        """Return the file of the result of one rank."""
        return self.result if self.ranks == 1 else f"{self.result}-{rank}"


def variables(task: Task) -> Mapping[str, str]:
    """Return the environment variables by which a session gets `task`."""
    return {VARIABLE: json.dumps(asdict(task))}


def pytest_configure(config: pytest.Config) -> None:
    given = os.environ.get(VARIABLE)
    if given:
        task = Task(**json.loads(given))
        own = replace(task, result=task.result_of(int(os.environ.get("RANK", "0"))))
        config.pluginmanager.register(RepairSession(config, own))


class TestFailedError(Exception):
    """A test failed before its region had ended; the message names the test's own error."""

    names_error = True


class NoMemoryLeftError(Exception):
    """A test ran out of the device's memory."""


class RepairSession:
    """Runs the tests of one session."""

    def __init__(self, config: pytest.Config, task: Task) -> None:
        self._config = config
        self._task = task
        self._found: list[dict[str, Any]] = []
        self._raised = ""
        """Where the test that runs has raised its first error."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remove limits: a broken one would be explained in each run."""
        for node in {node for item in items for node in item.listchain()}:
            node.own_markers[:] = [mark for mark in node.own_markers if mark.name not in MARKERS]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        with without_capture(self._config):
            self._show(f"{self._task.label or item.nodeid}:")
            self._raised = ""
            try:
                self._found.append({"test": item.nodeid, **self._do(item)})
            finally:
                self._write()
        return True

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Note where a test raises an error, because reports show frames of libraries, too."""
        if call.excinfo is None or self._raised:
            return
        # The file of a label is the one that calls the user's script.
        files = {str(item.path)} if self._task.label else set()
        self._raised = _users_frames(call.excinfo.tb, files)

    def _do(self, item: pytest.Item) -> dict[str, Any]:
        if self._task.mode == SEARCH:
            return self._search(item)
        if self._task.mode == MEASURE:
            try:
                figures = _run(item)
            except TestFailedError as error:
                return {"error": f"{error}{self._raised}"}
            except NoMemoryLeftError as error:
                return {"error": str(error)}
            return {"peak_bytes": figures[0], "reserved_bytes": figures[1]}
        return self._keep_values(item)

    def _search(self, item: pytest.Item) -> dict[str, Any]:
        from pytest_cka_memory.meters.accelerator.emulated import computes_values, emulated_cards
        from pytest_cka_memory.plugin.device import meter_of
        from pytest_cka_memory.repair.report import (
            RepairReport,
            asked_for,
            best,
            fits_as_it_is,
            next_fitting,
            text_to_write,
        )
        from pytest_cka_memory.repair.search import Search
        from pytest_cka_memory.repair.trials import Figures

        meter = meter_of(item.config)
        search = Search(
            lambda: Figures(*_run(item)),
            lambda error: isinstance(error, NoMemoryLeftError),
            progress=self._show,
            budget_bytes=self._task.budget_bytes,
            seconds=self._task.seconds,
            has_values=computes_values(),
            cards=emulated_cards(),
            goes_on=self._task.goes_on,
            also=self._task.also,
        )
        try:
            repairs = search.search()
        except TestFailedError as error:
            return {"error": f"{error}{self._raised}"}
        if repairs.as_it_is.figures is None and repairs.as_it_is.error != "out of memory":
            error_of_test = repairs.as_it_is.error
            return {"error": f"{error_of_test}{self._raised}" if error_of_test else "interrupted"}
        if repairs.as_it_is.figures is None and not self._task.goes_on:
            return {"error": "out of memory", "ran_out": True}
        report = RepairReport(repairs, meter.device, self._task.label or item.nodeid)
        pictures = []
        if self._task.draws and not repairs.was_interrupted:
            trials = [repairs.as_it_is, *report.recommended]
            pictures = [self._picture(item, trial) for trial in trials if trial.figures]
        return {
            "pictures": pictures,
            "budget_bytes": repairs.budget_bytes,
            "text": str(report),
            "interrupted": repairs.was_interrupted,
            "reserved_bytes": repairs.as_it_is.figures and repairs.as_it_is.figures.reserved_bytes,
            "peak_bytes": repairs.as_it_is.figures and repairs.as_it_is.peak_bytes,
            "flops": repairs.as_it_is.flops,
            "sizes": [repairs.sizes.batch, repairs.sizes.tokens],
            "peaks": {trial.name: trial.peak_bytes for trial in repairs.ran},
            "fits_as_it_is": fits_as_it_is(repairs),
            "recommended": [_to_prove(trial) for trial in best(repairs)],
            "also": [_to_prove(trial) for trial in asked_for(repairs)],
            "next": [
                {**_to_prove(trial), "text": text_to_write(repairs, trial)}
                for trial in next_fitting(repairs)
            ],
        }

    def _picture(self, item: pytest.Item, trial: "Trial") -> dict[str, Any]:
        """Run a test under the changes of a trial again; return its memory over time."""
        from pytest_cka_memory.core.memory_timeline import levels_of
        from pytest_cka_memory.plugin.settings import settings_key
        from pytest_cka_memory.repair.trials import Figures, tried

        self._show(f"memory over time: {trial.name}")
        pictures: list[tuple[int, dict[str, Any]]] = []

        def run() -> Figures:
            regions = [region for region in _run_regions(item) if region["completed"]]
            pictures[:] = [(each["peak_bytes"], each["memory_timeline"]) for each in regions]
            return Figures(0, None)

        stash = item.config.stash
        settings = stash[settings_key]
        stash[settings_key] = replace(settings, timeline="*")
        try:
            tried(trial.changes, run, lambda error: False)
        finally:
            stash[settings_key] = settings
        pictures.sort(key=lambda pair: pair[0])
        picture: dict[str, Any] = pictures[-1][1] if pictures else {"memories": []}
        whole: int = max(1, picture.get("events", 0))
        levels = [(100 * moment / whole, level) for moment, level in levels_of(picture)]
        return {"name": trial.name, "levels": levels}

    def _keep_values(self, item: pytest.Item) -> dict[str, Any]:
        from pytest_cka_memory.repair.proof import values_kept
        from pytest_cka_memory.repair.smaller import Sizes, made_smaller

        path = f"{self._task.result}-{len(self._found)}.pt"
        before, now = self._task.sizes or ((0, 0), (0, 0))
        with ExitStack() as stack:
            shrunk = None
            if before != now:
                shrunk = stack.enter_context(made_smaller(Sizes(*before), Sizes(*now)))
            try:
                with values_kept(path):
                    _run(item)
            except TestFailedError as error:
                return {"error": f"{error}{self._raised}"}
            except NoMemoryLeftError as error:
                return {"error": str(error)}
        return {"values": path, "shrunk": shrunk.tensors if shrunk else 0}

    def _show(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _write(self) -> None:
        Path(self._task.result).write_text(json.dumps(self._found), encoding="utf-8")

    def pytest_sessionfinish(self) -> None:
        self._write()


def _to_prove(trial: "Trial") -> dict[str, Any]:
    """Return what a proof of a trial needs; its files are None if a place is not known."""
    from pytest_cka_memory.repair import patched

    return {
        "name": trial.name,
        "peak_bytes": trial.peak_bytes,
        "numbers": trial.numbers,
        "cards": trial.cards,
        "files": dict(patched(trial.edits)) if trial.edits else None,
    }


def _run(item: pytest.Item) -> tuple[int, int | None]:
    """Run a test once; return the highest peak of its regions, and the highest reserve, in bytes.

    Raises:
        NoMemoryLeftError: if it ran out of the device's memory.
        TestFailedError: if it failed before the region with that peak had ended.
    """
    ended = [region for region in _run_regions(item) if region["completed"]]
    reserves = [region.get("reserved_peak_bytes") for region in ended]
    known = [size for size in reserves if size is not None]
    return max(region["peak_bytes"] for region in ended), max(known, default=None)


def _run_regions(item: pytest.Item) -> list[dict[str, Any]]:
    """Run a test once; return the records of its regions, of which at least one has ended."""
    import torch

    torch.manual_seed(0)
    reports = run_again(item)
    gc.collect()
    failed = next((report for report in reports if not report.passed), None)
    if failed is not None:
        message = _message(failed)
        if "OutOfMemoryError" in message or "CUDA out of memory" in message:
            raise NoMemoryLeftError(_place(failed) + message)
    regions = list(_regions(reports))
    ended = [region for region in regions if region["completed"]]
    if not ended or (failed is not None and len(ended) < len(regions)):
        raise TestFailedError(_message(failed) if failed is not None else "it was not measured")
    return regions


def _regions(reports: list[pytest.TestReport]) -> Iterator[dict[str, Any]]:
    for report in reports:
        payload = getattr(report, "cka_memory", None) or {}
        yield from payload.get("regions", ())


def _users_frames(raised: TracebackType | None, left_out: Collection[str]) -> str:
    """Return in parentheses which lines of the user's files an error passed; maybe empty."""
    from pytest_cka_memory.repair import lines_passed

    frames = traceback.extract_tb(raised)
    places = ((frame.filename, frame.lineno or 0, frame.name) for frame in frames)
    passed = lines_passed(places, left_out)
    return f" (at {passed})" if passed else ""


def _place(report: pytest.TestReport) -> str:
    """Return the lines of the user's files that a failure passed, with a colon."""
    from pytest_cka_memory.repair import lines_passed

    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", ())
    found = [place for entry in entries if (place := getattr(entry, "reprfileloc", None))]
    passed = lines_passed((str(Path(each.path).absolute()), each.lineno, "") for each in found)
    return f"{passed}: " if passed else ""


def _message(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    first = str(text).partition("\n")[0] or "the test failed"
    return first if report.when == "call" else f"{report.when}: {first}"
