"""The reporter: collects the results of a session, writes reports and prints the summary.

The results of pytest-xdist's workers come with their test reports; what they measured is merged in
:class:`pytest_cka_memory.core.report.ReportBuilder`.
"""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pytest

import pytest_cka_memory
from emulated_cuda import torch_versions
from pytest_cka_memory.core import conditions
from pytest_cka_memory.core.places import anonymizer
from pytest_cka_memory.core.report import (
    Collection,
    ReportBuilder,
    anonymous,
    file_of,
    is_scope,
    merged_collections,
)
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.integrations import is_controller, is_worker
from pytest_cka_memory.meters import is_emulated
from pytest_cka_memory.plugin import given_by, name_of
from pytest_cka_memory.plugin.pytest_private import terminal_width
from pytest_cka_memory.plugin.settings import Settings, describe, settings_key
from pytest_cka_memory.units import counted

if TYPE_CHECKING:
    from pytest_cka_memory.core.report import Report
    from pytest_cka_memory.reports.terminal import Line


class Output(Protocol):
    """Something that is written from the report after the tests have run."""

    @property
    def option(self) -> str:
        """The option that asks for it, for messages."""

    @property
    def path(self) -> Path | None:
        """The file that it replaces; None if it replaces none."""

    @property
    def is_public(self) -> bool:
        """Whether others read it, so that it must name no user, host or folder of this machine."""

    def check(self) -> None:
        """Raise ReportError if it cannot be written; called before any test has run."""

    def write(self, report: "Report") -> str:
        """Write `report` and return a line that says so; raise ReportError if it fails."""


class FileOutput(NamedTuple):
    """A report file; an error while writing leaves an old file as it was."""

    option: str
    path: Path
    renderer: str
    """The module that renders it; imported when it is written."""
    is_public: bool = True

    def check(self) -> None:
        from pytest_cka_memory.reports import files

        files.check_writable(self.path)

    def write(self, report: "Report") -> str:
        from pytest_cka_memory.reports import files

        files.write_whole(self.path, import_module(self.renderer).render(report))
        return f"figures written to {self.path}"


_RENDERERS: Mapping[str, str] = {
    "json": "pytest_cka_memory.stored.json_report",
    "markdown": "pytest_cka_memory.reports.markdown",
    "html": "pytest_cka_memory.reports.html.page",
}


def outputs_of(settings: Settings) -> list[Output]:
    """Return every output that `settings` ask for."""
    reports = [
        FileOutput(f"--cka-memory-{name}", settings.files[name], renderer)
        for name, renderer in _RENDERERS.items()
        if name in settings.files
    ]
    others: list[Output] = []
    baseline = settings.baseline
    # A report may be given the path at which later sessions look for baselines.
    if baseline.asked_for or reports or baseline.path.exists():
        from pytest_cka_memory.stored.update import BaselineOutput

        others.append(BaselineOutput(baseline))
    if settings.history is not None:
        from pytest_cka_memory.stored.history import HistoryOutput

        others.append(HistoryOutput(settings.history, settings.root))
    if settings.github is not None:
        from pytest_cka_memory.integrations.github import GitHubOutput

        # The last, because its annotations name the outputs that could not be written.
        others.append(GitHubOutput(settings.github))
    return [*reports, *others]


def check(outputs: Sequence[Output], given_by: Callable[[str], str] = str) -> None:
    """Check all outputs before any test has run.

    Args:
        outputs: what the session will write.
        given_by: returns the ini key instead of an option if the path comes from there.

    Raises:
        ReportError: if one cannot be written, or two would write the same file. Its message names
            the option.
    """
    for output in outputs:
        try:
            output.check()
        except ReportError as error:
            raise ReportError(f"{given_by(output.option)}: {error}") from None
    if len(outputs) < 2:
        return
    from pytest_cka_memory.reports import files

    for first, second in combinations(outputs, 2):
        if first.path and second.path and files.same_file(first.path, second.path):
            raise ReportError(
                f"{given_by(first.option)} and {given_by(second.option)}: both name the file "
                f"{first.path}, so one would overwrite the other; give each a path of its own"
            )


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
        if is_worker(self._config):
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
        if is_controller(self._config):
            return merged_collections(self._of_workers)
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


class Reporter:
    """Reports a session; registered in a serial run, or in the controller of a parallel one."""

    process = "main"
    """Name of this process in reports, if it measures tests itself."""

    def __init__(self, config: pytest.Config) -> None:
        self.settings = config.stash[settings_key]
        self.builder = ReportBuilder()
        self.outputs = outputs_of(self.settings)
        self.written: list[str] = []
        """A line for each report that was written."""
        self.problems: list[str] = []
        """Reasons why the session failed that belong to no test."""
        self.warned: list[str] = []
        """Broken relations between tests that do not fail the session."""
        self._reruns: set[tuple[str, str]] = set()
        """Tests that will be run again, each with its worker."""
        self._warnings_in_header: Sequence[str] = ()
        self._ran = False
        """Whether tests were run, unlike with --collect-only, --fixtures or --cache-show."""

    def join(self, nodeids: Iterable[str], finished: Iterable[str]) -> None:
        """Start to report a session in which tests already run."""
        self._ran = True
        self.builder.expect(nodeids)
        for nodeid in finished:
            self.builder.finish(nodeid)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        try:
            check(self.outputs, lambda option: given_by(session.config, name_of(option)))
        except ReportError as error:
            raise pytest.UsageError(str(error)) from None

    def pytest_report_header(self) -> list[str]:
        described = describe(self.settings)
        if not described:
            return []
        lines = [f"cka-memory: {described}"]
        owners = owners_of_cka()
        if len(owners) > 1:
            lines.append(
                f"cka-memory: warning: package 'cka' is installed by {' and by '.join(owners)}, "
                "and which one is imported is undefined; uninstall all but one of them"
            )
        self._warnings_in_header = self._warnings()
        return lines + [f"cka-memory: {warning}" for warning in self._warnings_in_header]

    def _warnings(self) -> list[str]:
        """Return what is known in this process so far; some needs torch, which may come later."""
        texts = [torch_versions.warning_about(conditions.installed_torch())]
        if is_emulated(self.settings.device):
            from emulated_cuda import activation

            texts += activation.warnings()
        return [f"{_WARNING}{text}" for text in texts if text]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.builder.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.builder.expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._reruns and report.when == "setup":
            run = report.nodeid, self._worker(report)
            if run in self._reruns:
                self._reruns.remove(run)
                self.builder.forget(*run)
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # pytest-rerunfailures
            self._reruns.add((report.nodeid, self._worker(report)))
        payload = getattr(report, "cka_memory", None)
        if payload is not None:
            nodeid = report.nodeid
            self.builder.locate(nodeid, *report.location[:2])
            self.builder.add(nodeid, self._worker(report), _outcome(report), payload)
            report.cka_memory = None  # type: ignore[attr-defined]  # pytest keeps every report
        if report.when == "teardown":
            self.builder.finish(report.nodeid, teardown_failed=report.failed)

    def _worker(self, report: pytest.TestReport) -> str:
        worker: str = getattr(report, "worker_id", self.process)
        return worker

    # pytest_sessionfinish would be too late: the status in the summary line is decided before.
    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        self._ran = not session.config.option.collectonly
        result = yield
        self._gate(session)
        return result

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK:  # pytest.exit(returncode=0) has left the loop early
            self._gate(session)
        if not self._ran:
            return
        if self.outputs:
            self._write(session, self.builder.report())

    def _write(self, session: pytest.Session, report: "Report") -> None:
        report = replace(report, collection=collection_of(session.config))
        root = session.config.rootpath
        public = anonymous(report, root)
        for output in self.outputs:
            shown, change = (public, anonymizer(root)) if output.is_public else (report, str)
            try:
                current = replace(shown, problems=tuple(map(change, self.problems)))
                self.written += filter(None, [output.write(current)])
            except ReportError as error:
                self._fail(session, str(error))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = list(self._lines(terminal_width(terminalreporter.config))) if self._ran else []
        if lines:
            terminalreporter.section("cka-memory")
        for line in lines:
            colour = {line.colour: True} if line.colour else {}
            terminalreporter.write_line(line.text, **colour)

    def _lines(self, width: int) -> "Iterator[Line]":
        from pytest_cka_memory.reports import terminal

        settings, report = self.settings, self.builder.report()
        if settings.report and report.results:
            choice = settings.rows or terminal.DEFAULT
            yield from terminal.figures(report, width, choice, self._elsewhere())
        else:
            yield from terminal.unjudged(report.results, width)
        if settings.explain:
            shown = terminal.shown_rows(report, settings.rows or terminal.DEFAULT)
            yield from terminal.kinds_at_peaks(shown, width)
        if settings.reports_something:
            if not report.results:
                yield from terminal.sentence(_NOTHING, width, "yellow")
            for reason, count in report.unmeasured.items():
                yield from terminal.sentence(f"{count} not measured: {reason}", width, "yellow")
            yield from terminal.missing(report.missing)
        for warning in self._late_warnings(report) if report.results else ():
            yield from terminal.sentence(warning, width, "yellow")
        yield from map(terminal.Line, self.written)
        yield from (terminal.Line(text, "yellow") for text in self.warned)
        for problem in self.problems:
            yield terminal.Line(
                f"FAILED: {problem}", "red"
            )  # in one piece, because it may name a path

    def _elsewhere(self) -> str:
        """Return where the regions are that the table leaves out."""
        files = [path.name for name, path in self.settings.files.items() if name != "markdown"]
        if files:
            return f"all are in {' and '.join(files)}"
        return "--cka-memory-report=all prints all, --cka-memory-html=PATH writes all"

    def _late_warnings(self, report: "Report") -> Iterator[str]:
        """Yield the warnings, also those of workers, that neither header nor table has shown."""
        notes = report.session["notes"]
        shown = {*self._warnings_in_header, *(notes if self.settings.report else ())}
        of_meters = (note for note in notes if note.startswith(_WARNING))
        yield from (
            text for text in dict.fromkeys([*self._warnings(), *of_meters]) if text not in shown
        )

    def _gate(self, session: pytest.Session) -> None:
        for result, breach in self.builder.judge_relations():
            text = f"{result.name}: {breach.limit}: {breach.message}"
            if result.verdict_of(breach) == "BREACH":
                self._fail(session, text)
            else:
                self.warned.append(f"{result.verdict_of(breach)}: {text}")
        measured, wanted = self.builder.measured, self.settings.min_regions
        if self._ran and measured < wanted:
            self._fail(
                session,
                f"{counted(measured, 'region')} measured, but "
                f"--cka-memory-min-regions={wanted}; look for skipped or deselected tests, "
                "or lower the minimum",
            )

        # What a class or module breaks fails the teardown of its last test.
        fixtures = [it for it in self.builder.of_fixtures if not is_scope(it.nodeid)]
        for result in fixtures if self._ran else ():
            for breach in (each for each in result.breaches if not each.warns):
                self._fail(session, f"{result.name}: {breach.limit}: {breach.message}")

    def _fail(self, session: pytest.Session, problem: str) -> None:
        self.problems.append(problem)
        session.testsfailed += 1
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # for problems found in sessionfinish


def owners_of_cka() -> list[str]:
    """Return the distributions that have installed a package ``cka``.

    pytorch-cka installs one too, and which of them is imported is undefined. To read all
    distributions takes 70 ms, so it is done only if there is a second folder ``cka``, or if ours
    contains a file that is not part of this project. A folder without ``__init__.py``, such as one
    of tests, is not a package that could be imported in place of ours.
    """
    ours = Path(pytest_cka_memory.__file__).parents[1] / "cka"
    packages = (Path(entry) / "cka" for entry in sys.path)
    folders = {package for package in packages if (package / "__init__.py").is_file()}
    files = {path.name for path in ours.iterdir()} - {"__pycache__", "py.typed"}
    if folders <= {ours} and files <= CKA_PARTS:
        return []
    from importlib.metadata import packages_distributions

    return sorted(set(packages_distributions().get("cka", [])))


CKA_PARTS = frozenset(
    (
        *(
            "__init__.py",
            "comparison.py",
            "data.py",
            "errors.py",
            "gate.py",
        ),
        *("layer_ticks.py", "many.py", "plots.py", "result.py", "result_file.py"),
        *("samples.py", "stored.py", "stored_comparison.py", "capture", "functional", "running"),
    )
)
"""What the folder of our own package contains."""

_WARNING = "warning: "
_NOTHING = (
    "nothing was measured: give tests a memory marker or the cka_memory fixture, "
    "or use --cka-memory-report to measure every test"
)


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.passed else "xfailed"
    return "error" if report.when == "teardown" and report.failed else report.outcome
