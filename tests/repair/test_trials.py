"""A trial: what it prints, and how long it may take."""

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_cka_memory.plugin.repair_session import _place
from pytest_cka_memory.repair import lines_passed, trials
from pytest_cka_memory.repair.trials import Change, Copied, Figures, Trial, flops_of, tried


def tried_with_limit(seconds: float, limit_s: float) -> Trial:
    """Try a step that waits."""

    def run() -> Figures:
        time.sleep(seconds)
        return Figures(1, None)

    return tried([], run, lambda error: False, limit_s=limit_s)


@pytest.mark.slow
def test_trial_that_hangs_is_ended() -> None:
    """Its row says why it has no peak; a trial within the limit is not disturbed."""
    began = time.monotonic()
    assert tried_with_limit(30, 1).error == "the run takes longer than 1 s"
    assert time.monotonic() - began < 20
    assert tried_with_limit(0, 30).peak_bytes == 1


@pytest.mark.slow
def test_limit_holds_where_ctrl_c_is_ignored() -> None:
    """As in a program that a shell starts in the background; the alarm is free afterwards."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert tried_with_limit(30, 1).error == "the run takes longer than 1 s"
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_ctrl_c_in_a_trial_is_not_taken_for_its_limit() -> None:
    """It ends the search, which the limit does not."""

    def run() -> Figures:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tried([], run, lambda error: False, limit_s=30)


def test_limit_follows_the_step_as_it_is() -> None:
    """A quick step may take a minute under a change, a slow one ten times as long as it is."""
    assert [trials.limit_after(seconds) for seconds in (0.1, 6, 60)] == [60, 60, 600]


def test_what_a_step_prints_in_a_trial_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    """It would be shown dozens of times; what other code prints afterwards is shown."""

    @contextmanager
    def change(copied: Copied) -> Iterator[None]:
        yield

    def run() -> Figures:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        return Figures(1, None)

    assert tried([Change("nothing", "none", change)], run, lambda error: False).error == ""
    assert flops_of((), run) == 0
    assert tried([], run, lambda error: False, limit_s=math.inf).peak_bytes == 1
    print("after")
    assert capsys.readouterr() == ("after\n", "")


def test_place_where_memory_was_full_is_in_the_files_of_the_user(tmp_path: Path) -> None:
    """The innermost line is first; what pytest reports of a script is read in the same way."""
    script = tmp_path / "train.py"
    script.write_text("", encoding="utf-8")
    lines = [(str(script), 90), (torch.__file__, 1), (str(script), 30), (math.__name__, 2)]
    passed = lines_passed((file, line, "") for file, line in lines)
    assert passed == "train.py:30, from train.py:90"
    names = lines_passed((file, line, "step") for file, line in lines)
    assert names == "train.py:30 in step, from train.py:90 in step"
    many = lines_passed((str(script), line, "<module>") for line in range(6))
    assert many == "train.py:5, from train.py:4, from train.py:3, from train.py:2, from ..."
    places = [SimpleNamespace(path=path, lineno=line) for path, line in lines]
    entries = [*(SimpleNamespace(reprfileloc=place) for place in places), SimpleNamespace()]
    traceback = SimpleNamespace(reprentries=entries)
    report: Any = SimpleNamespace(longrepr=SimpleNamespace(reprtraceback=traceback))
    assert _place(report) == f"{passed}: "
    report.longrepr = "a text"
    assert _place(report) == ""
