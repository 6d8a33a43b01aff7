"""The end of a session under torchrun: the ranks meet, rank 0 reports, and all fail together."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pytest_cka_memory.errors import RankError
from pytest_cka_memory.integrations import xdist
from pytest_cka_memory.integrations.sigterm import OnSigterm
from pytest_cka_memory.integrations.torchrun import Rank, RankSync, this_rank
from pytest_cka_memory.plugin import items
from pytest_cka_memory.plugin.reporter import Reporter
from pytest_cka_memory.plugin.settings import describe
from pytest_cka_memory.reports.terminal import Line


def reporter(config: pytest.Config) -> Reporter:
    """Return the reporter of this process.

    Raises:
        pytest.UsageError: for workers of pytest-xdist under torchrun.
    """
    rank = this_rank()
    if rank is None:
        return Reporter(config)
    if xdist.is_controller(config):
        raise pytest.UsageError(
            "pytest-xdist under torchrun: every worker would take itself for the rank that started "
            "it; leave out -n, or torchrun"
        )
    return RankReporter(config, RankSync(rank, config.stash[items.settings_key].rank_timeout_s))


class RankReporter(Reporter):
    """Of one rank: the first reports for all, the others hand it their figures and wait.

    A session that measures nothing on any rank only says so to the others: nothing fails in it.
    """

    def __init__(self, config: pytest.Config, meeting: RankSync) -> None:
        super().__init__(config)
        self._meeting = meeting
        self._rank: Rank = meeting.rank
        self.process = self._rank.name
        self._takes_part = bool(describe(self.settings))
        self._met = False
        self._stopped = False
        self._partners: list[int] = []
        """Ranks that wait for this one before they leave."""
        self._sigterm = OnSigterm(self._stop)
        if self._rank.number != 0:
            self.outputs = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        super().pytest_collection_finish(session)
        if session.config.option.collectonly:
            return
        self._takes_part = self._takes_part or any(map(items.is_measured, session.items))
        if self._takes_part:
            self._sigterm.start()

    def pytest_runtest_logfinish(self) -> None:
        if self._takes_part and "torch" in sys.modules:
            try:
                self._meeting.beat()
            except (RankError, RuntimeError):
                self._takes_part = True  # said at the end, where it can be said once

    def _gate(self, session: pytest.Session) -> None:
        super()._gate(session)  # by its own figures: more ranks do not make up for an empty one
        if self._ran:
            self._meet(session)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not session.config.option.collectonly and (self._ran or exitstatus != 0):
            if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                self._meeting.hurry()
            self._meet(session, exitstatus)
        super().pytest_sessionfinish(session, exitstatus)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        # torchrun ends every rank when one has left with a failure: let all have printed theirs.
        config.get_terminal_writer().flush()
        if self._met and self._takes_part:
            try:
                self._meeting.say("leaving", True)
                self._meeting.hear("leaving", self._partners)
            except (RankError, RuntimeError):
                pass
        self._sigterm.stop()

    def _stop(self) -> None:
        """On SIGTERM: end the tests in good order, and the report with what there is."""
        self._meeting.hurry()
        if not self._met and not self._stopped:
            self._stopped = True
            pytest.exit("SIGTERM: torchrun stops this rank, another has ended")

    def _meet(self, session: pytest.Session, exitstatus: int = 0) -> None:
        """Hand over or gather, once a session; a failure of any rank is one of every rank."""
        if self._met:
            return
        self._met = True
        word = {
            "takes_part": self._takes_part,
            "failures": self._failures(session, exitstatus),
            "gathered": self.gathered.to_dict(),
        }
        try:
            problems = self._gather(word) if self._rank.number == 0 else self._hand_over(word)
        except (RankError, RuntimeError) as error:
            problems = [f"the ranks cannot report together: {error}"] if self._takes_part else []
        for problem in problems:
            if exitstatus == 0:
                self._fail(session, problem)
            else:  # a status that says more
                self.problems.append(problem)

    def _failures(self, session: pytest.Session, exitstatus: int) -> list[str]:
        """What failed on this rank, for the others to know."""
        failed = session.testsfailed - len(self.problems)
        said = [*self.problems, *([f"{failed} failed"] if failed else [])]
        if not said and exitstatus:
            said = [pytest.ExitCode(exitstatus).name.lower().replace("_", " ")]
        return said

    def _gather(self, word: dict[str, Any]) -> list[str]:
        """As rank 0: hear all ranks, tell them what failed where, and take in their figures."""
        others = range(1, self._rank.world)
        heard = self._meeting.hear("figures", others)
        self._takes_part = word["takes_part"] or any(said["takes_part"] for said in heard.values())
        failures = {number: said["failures"] for number, said in heard.items()}
        failures |= {number: [self._silence()] for number in others if number not in heard}
        if not self._takes_part:
            return []
        told = {0: word["failures"], **failures}
        self._meeting.say("verdict", [[n, text] for n in sorted(told) for text in told[n]])
        self._partners = [number for number, said in heard.items() if said["takes_part"]]
        for number in sorted(heard):
            self.gathered.absorb(heard[number]["gathered"])
        return [f"rank {number}: {text}" for number in others for text in failures[number]]

    def _hand_over(self, word: dict[str, Any]) -> list[str]:
        """As any other rank: send the figures, and wait for what failed elsewhere."""
        self._meeting.say("figures", word)
        if not self._takes_part:
            return []
        verdict = self._meeting.hear("verdict", [0]).get(0)
        if verdict is None:
            return [f"rank 0: {self._silence()}"]
        self._partners = [0]
        return [f"rank {n}: {text}" for n, text in verdict if n != self._rank.number]

    def _silence(self) -> str:
        return (
            f"ended no test and sent nothing for {self._meeting.patience_s:g} s: it died or hangs, "
            "or needs a longer --cka-memory-rank-timeout"
        )

    def _lines(self, width: int) -> Iterator[Line]:
        if self._rank.number == 0:
            yield from super()._lines(width)
        elif self._takes_part:
            count = len(self.gathered.results)
            yield Line(f"{self._rank.name} measured {count} regions: see the report of rank 0")
            for problem in self.problems:
                yield Line(f"FAILED: {problem}", "red")
