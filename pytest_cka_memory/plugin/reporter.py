"""The end of a session, in the one process that reports: gather, write, gate and print."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_cka_memory.core.report import ReportBuilder
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.plugin import items
from pytest_cka_memory.plugin.outputs import outputs_of
from pytest_cka_memory.plugin.settings import describe
from pytest_cka_memory.reports import terminal
from pytest_cka_memory.reports.terminal import Line


class Reporter:
    """Registered where test reports arrive: a serial run, or the controller of a parallel one."""

    process = "main"
    """How reports call this one, where it measures by itself."""

    def __init__(self, config: pytest.Config) -> None:
        self.settings = config.stash[items.settings_key]
        self.gathered = ReportBuilder()
        self.outputs = outputs_of(self.settings)
        self.written: list[str] = []
        """What outputs were written, in a line each."""
        self.problems: list[str] = []
        """What failed the session beyond its tests."""
        self._again: set[tuple[str, str]] = set()
        """Tests, each with its worker, that will be run once more."""
        self._ran = False
        """Whether tests were run: no --collect-only, --fixtures or --cache-show."""

    def join(self, nodeids: Iterable[str], finished: Iterable[str]) -> None:
        """Take part in a session whose tests already run."""
        self._ran = True
        self.gathered.expect(nodeids)
        for nodeid in finished:
            self.gathered.finish(nodeid)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        for output in self.outputs:
            try:
                output.check()
            except ReportError as error:
                raise pytest.UsageError(f"{output.option}: {error}") from None

    def pytest_report_header(self) -> list[str]:
        described = describe(self.settings)
        if not described:
            return []
        from importlib.metadata import packages_distributions

        lines = [f"cka-memory: {described}"]
        # Both install a package of this name, and whichever came last is the one imported.
        owners = sorted(set(packages_distributions().get("cka", [])))
        if len(owners) > 1:
            lines.append(
                f"cka-memory: warning: package 'cka' is installed by {' and by '.join(owners)}, "
                "and only one of them can be imported; keep one in this environment"
            )
        return lines

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.gathered.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.gathered.expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        payload = getattr(report, "cka_memory", None)
        worker = getattr(report, "worker_id", self.process)
        if report.when == "setup" and (report.nodeid, worker) in self._again:
            self._again.remove((report.nodeid, worker))
            self.gathered.forget(report.nodeid, worker)
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # pytest-rerunfailures
            self._again.add((report.nodeid, worker))
        if payload is not None:
            self.gathered.locate(report.nodeid, *report.location[:2])
            self.gathered.add(report.nodeid, worker, _outcome(report), payload)
        if report.when == "teardown":
            self.gathered.finish(report.nodeid, teardown_failed=report.failed)

    # Not in sessionfinish alone: by then the summary's status is settled.
    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, Any]:
        self._ran = not session.config.option.collectonly
        result = yield
        self._gate(session)
        return result

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK:  # pytest.exit(returncode=0) ends the loop before
            self._gate(session)
        report = self.gathered.report()
        for output in self.outputs if self._ran else ():
            try:
                now = replace(report, problems=tuple(self.problems))
                self.written += filter(None, [output.write(now)])
            except ReportError as error:
                self._fail(session, str(error))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = list(self._lines(terminalreporter._tw.fullwidth)) if self._ran else []
        if lines:
            terminalreporter.section("cka-memory")
        for line in lines:
            colour = {line.colour: True} if line.colour else {}
            terminalreporter.write_line(line.text, **colour)

    def _lines(self, width: int) -> Iterator[Line]:
        settings, gathered = self.settings, self.gathered
        if settings.report and gathered.results:
            yield from terminal.table(gathered.results, max(width, 100))
            yield Line("")
            yield from terminal.legend(gathered.report().session)
            yield from terminal.findings(gathered.results, max(width, 100))
        else:
            yield from terminal.unjudged(gathered.results)
        if settings.report or settings.files or settings.baseline.asked_for:
            if not gathered.results:
                yield Line(_NOTHING, "yellow")
            for reason, count in gathered.unmeasured.items():
                yield Line(f"{count} not measured: {reason}", "yellow")
            yield from terminal.missing(gathered.missing)
        yield from map(Line, self.written)
        for problem in self.problems:
            yield Line(f"FAILED: {problem}", "red")

    def _gate(self, session: pytest.Session) -> None:
        measured, wanted = self.gathered.measured, self.settings.min_regions
        if self._ran and measured < wanted:
            self._fail(session, f"{measured} regions measured, --cka-memory-min-regions={wanted}")

    def _fail(self, session: pytest.Session, problem: str) -> None:
        self.problems.append(problem)
        session.testsfailed += 1
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # for a problem found in sessionfinish


_NOTHING = (
    "nothing was measured: give tests a memory marker or the cka_memory fixture, "
    "or write --cka-memory-report to measure every test"
)


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.passed else "xfailed"
    return "error" if report.when == "teardown" and report.failed else report.outcome
