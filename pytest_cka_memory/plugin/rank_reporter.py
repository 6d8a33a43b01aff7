"""The reporter under torchrun: rank 0 reports for all ranks, and a failure of one fails all.

A rank whose main thread is in a call that does not return, such as a collective, is ended here.
"""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from pytest_cka_memory.errors import RankError
from pytest_cka_memory.integrations import is_controller, this_rank
from pytest_cka_memory.integrations.torchrun import OnSigterm, RankSync
from pytest_cka_memory.plugin.plan import plan_of
from pytest_cka_memory.plugin.pytest_private import without_capture
from pytest_cka_memory.plugin.reporter import Reporter
from pytest_cka_memory.plugin.settings import describe, settings_key
from pytest_cka_memory.reports.terminal import Line
from pytest_cka_memory.units import counted

LONGEST_REPORT_S = 15
"""How long the rank may take to report; torchrun would kill it 30 s after SIGTERM."""
_STDERR = 2
_CALLERS = ("_pytest", "pluggy", "pytest_cka_memory")


def end_blocked(
    config: pytest.Config, rank: str, test: str | None, report: Callable[[str], None]
) -> None:
    """Say where the main thread is blocked, report, and end the process; call it in a thread.

    Args:
        config: of the session.
        rank: name of the rank.
        test: the test that runs, if one does.
        report: reports the session; called with one line that says what happened.
    """
    try:
        # If the report waits for something that the main thread holds, C code ends the process.
        faulthandler.dump_traceback_later(LONGEST_REPORT_S, exit=True, file=_STDERR)
        problem = f"SIGTERM: {rank} was blocked in {test or 'no test'} and has been ended"
        with without_capture(config):
            print(f"\n{problem}; it was at", file=sys.stderr)
            print(*stack_of_main_thread(), sep="", file=sys.stderr, flush=True)
            report(problem)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
    except BaseException:
        with suppress(Exception):
            os.write(_STDERR, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(pytest.ExitCode.INTERRUPTED)


def stack_of_main_thread() -> list[str]:
    """Return what the main thread does, as lines of a traceback without the frames of pytest."""
    innermost = sys._current_frames()[threading.main_thread().ident or 0]
    frames: list[FrameType] = []
    for frame in _from(innermost):
        if frame.f_globals.get("__name__", "").partition(".")[0] in _CALLERS:
            break
        frames.insert(0, frame)
    shown = ((frame, frame.f_lineno) for frame in frames or [innermost])
    return traceback.StackSummary.extract(shown).format()


def _from(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


SHORTEST_WAIT_AFTER_FAILURE_S = 5.0
"""How long a rank that failed waits for the others, if its own tests took less than half of it."""


def reporter(config: pytest.Config) -> Reporter:
    """Return the reporter of this process.

    Raises:
        pytest.UsageError: if pytest-xdist is used under torchrun.
    """
    rank = this_rank()
    if rank is None:
        return Reporter(config)
    if is_controller(config):
        raise pytest.UsageError(
            "-n: pytest-xdist under torchrun is not supported, because every worker would act as "
            "the rank that started it; leave out -n, or run without torchrun"
        )
    return RankReporter(config, RankSync(rank, config.stash[settings_key].rank_timeout_s))


class RankReporter(Reporter):
    """The reporter of one rank: rank 0 reports for all, the others send it their results and wait.

    If no rank measures anything, the ranks only exchange that, and nothing is reported or failed.
    """

    def __init__(self, config: pytest.Config, sync: RankSync) -> None:
        super().__init__(config)
        self._sync = sync
        self._rank = sync.rank
        self.process = self._rank.name
        self._takes_part = bool(describe(self.settings))
        """Whether this rank measures, or an option of its session asks for something."""
        self._exchanged = False
        self._stopped = False
        self._began = time.monotonic()
        """When the test that runs now began."""
        self._longest_s = 0.0
        """How long the longest test took; the other ranks run the same tests."""
        self._test: str | None = None
        """The test that runs now."""
        self._failed = False
        """Whether a test has failed on this rank."""
        self._before_failure: set[str] = set()
        """Tests that this rank had finished when the first one failed."""
        self._waited_for_by: list[int] = []
        """Ranks that wait for this one before they end."""
        self._sigterm = OnSigterm(self._stop, self._end_blocked)
        if self._rank.number != 0:
            self.outputs = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        super().pytest_collection_finish(session)
        if session.config.option.collectonly:
            return
        measures = any(plan_of(item).is_measured for item in session.items)
        self._takes_part = self._takes_part or measures
        self._session = session
        if self._takes_part:
            self._sigterm.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid
        self._began = time.monotonic()
        if self._takes_part:
            self._sigterm.resume()
            self._show_progress(lambda: self._sync.begin(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        super().pytest_runtest_logreport(report)
        self._failed = self._failed or report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._test = None
        self._longest_s = max(self._longest_s, time.monotonic() - self._began)
        if not self._failed:
            self._before_failure.add(nodeid)
        if self._takes_part:
            self._show_progress(self._sync.heartbeat)

    def _show_progress(self, send: Callable[[], None]) -> None:
        if "torch" in sys.modules:
            # The exchange at the end has the same error and reports it once.
            with suppress(RankError, RuntimeError):
                send()

    def _gate(self, session: pytest.Session) -> None:
        # By this rank's results alone: regions of other ranks do not count towards its minimum.
        super()._gate(session)
        if self._ran:
            self._exchange(session)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not session.config.option.collectonly and (self._ran or exitstatus != 0):
            if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                self._sync.shorten_wait()
            self._exchange(session, exitstatus)
        super().pytest_sessionfinish(session, exitstatus)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        # torchrun ends all ranks as soon as one has failed: wait until each has printed its part.
        config.get_terminal_writer().flush()
        if self._exchanged and self._takes_part:
            with suppress(RankError, RuntimeError):
                self._sync.publish("leaving", True)
                self._sync.collect("leaving", self._waited_for_by)
        self._sigterm.stop()

    def _stop(self) -> None:
        """End the tests on SIGTERM, so that a report of what has run is still written."""
        self._sync.shorten_wait()
        if not self._exchanged and not self._stopped:
            self._stopped = True
            pytest.exit("SIGTERM: torchrun stops this rank because another has ended")

    def _end_blocked(self) -> None:
        """Report and end this rank on SIGTERM, in place of its main thread, which cannot."""
        end_blocked(self._session.config, self._rank.name, self._test, self._report_blocked)

    def _report_blocked(self, problem: str) -> None:
        session, config = self._session, self._session.config
        if not self._exchanged:
            self.problems.append(problem)
            self._sync.shorten_wait()
            self._exchange(session, pytest.ExitCode.INTERRUPTED)
            super().pytest_sessionfinish(session, pytest.ExitCode.INTERRUPTED)
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            status = pytest.ExitCode.INTERRUPTED
            config.hook.pytest_terminal_summary(
                terminalreporter=terminal, exitstatus=status, config=config
            )
        with suppress(RankError, RuntimeError):
            self._sync.publish("leaving", True)

    def _exchange(self, session: pytest.Session, exitstatus: int = 0) -> None:
        """Exchange results, once per session; a failure of one rank fails every rank."""
        if self._exchanged:
            return
        self._exchanged = True
        results = {
            "takes_part": self._takes_part,
            "failures": self._failures(session, exitstatus),
            "report": self.builder.to_dict(),
        }
        if results["failures"]:
            # The others may wait in a collective for this rank, which torchrun would end only when
            # one rank has ended.
            # A rank in an earlier test cannot wait for what failed here.
            ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
            self._sync.shorten_wait(
                max(SHORTEST_WAIT_AFTER_FAILURE_S, 2 * self._longest_s),
                unless_in=self._before_failure if self._failed and ended else (),
            )
        exchange = self._collect_results if self._rank.number == 0 else self._send_results
        try:
            problems = exchange(results)
        except (RankError, RuntimeError) as error:
            problem = f"the ranks cannot write one report: {error}"
            problems = [problem] if self._takes_part else []
        for problem in problems:
            if exitstatus == 0:
                self._fail(session, problem)
            else:  # the exit status says more than TESTS_FAILED would
                self.problems.append(problem)

    def _failures(self, session: pytest.Session, exitstatus: int) -> list[str]:
        """Return what failed on this rank, for the other ranks to show."""
        failed = session.testsfailed - len(self.problems)
        failures = [*self.problems, *([f"{failed} failed"] if failed else [])]
        if not failures and exitstatus:
            failures = [pytest.ExitCode(exitstatus).name.lower().replace("_", " ")]
        return failures

    def _collect_results(self, own: dict[str, Any]) -> list[str]:
        """On rank 0: collect the results of all ranks and send each the failures of the others."""
        others = range(1, self._rank.world_size)
        collected = self._sync.collect("results", others)
        results = {0: own, **collected}
        self._takes_part = any(result["takes_part"] for result in results.values())
        if not self._takes_part:
            return []
        failures = {number: result["failures"] for number, result in results.items()}
        failures |= {
            number: [self._timed_out(number)] for number in others if number not in collected
        }
        self._sync.publish(
            "failures", [[number, text] for number in sorted(failures) for text in failures[number]]
        )
        self._waited_for_by = [n for n, result in collected.items() if result["takes_part"]]
        for number in sorted(collected):
            self.builder.absorb(collected[number]["report"])
        return [f"rank {number}: {text}" for number in others for text in failures[number]]

    def _send_results(self, own: dict[str, Any]) -> list[str]:
        """On any other rank: send its results to rank 0, and wait for the failures of all ranks."""
        self._sync.publish("results", own)
        if not self._takes_part:
            return []
        failures = self._sync.collect("failures", [0]).get(0)
        if failures is None:
            return [f"rank 0: {self._timed_out(0)}"]
        self._waited_for_by = [0]
        return [
            f"rank {number}: {text}" for number, text in failures if number != self._rank.number
        ]

    def _timed_out(self, number: int) -> str:
        """Return what is known of a rank that :meth:`RankSync.collect` has treated as hung."""
        seconds, test = self._sync.timeout_of(number), self._sync.test_of(number)
        waited = f"finished no test and sent nothing for {seconds:g} s"
        last = f"; the last test that it began is {test}" if test else ""
        if seconds < self.settings.rank_timeout_s:
            return (
                f"{waited}, after this rank had failed or was stopped; the other rank has "
                f"ended, or waits{last}"
            )
        return (
            f"{waited}, so the rank has ended or hangs; if its tests take longer, give a "
            f"longer --cka-memory-rank-timeout{last}"
        )

    def _lines(self, width: int) -> Iterator[Line]:
        if self._rank.number == 0:
            yield from super()._lines(width)
        elif self._takes_part:
            regions = counted(len(self.builder.results), "region")
            yield Line(f"{self._rank.name} measured {regions}: see the report of rank 0")
            for problem in self.problems:
                yield Line(f"FAILED: {problem}", "red")
