"""End a rank whose main thread is in a call that does not return, such as a collective."""

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

import pytest

from pytest_cka_memory.plugin.pytest_private import without_capture

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
