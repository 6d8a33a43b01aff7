"""The commands of ``python -m pytest_cka_memory``, and the sessions of pytest that they start."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.plugin import repair_session
from pytest_cka_memory.plugin.repair_session import SEARCH, Task

_MOST_LINES = 40
_TO_END = 40.0
"""Seconds in which a session must end that took too long."""


class Session:
    """Starts sessions of pytest with the same tests.

    Args:
        device: as ``--cka-memory-device`` takes it.
        arguments: those for pytest.
        shows_progress: whether a search shows a line for each trial.
    """

    def __init__(
        self, device: str, arguments: Sequence[str], *, shows_progress: bool = True
    ) -> None:
        self.device = device
        self.card_that_was_full: str | None = None
        """The device that was asked for, if the test did not fit it and another one is used."""
        self._shows_progress = shows_progress
        self._begun = time.monotonic()
        self.arguments = list(arguments)

    def show(self, line: str) -> None:
        """Show what is done now, and the minutes so far, unless the user wants no progress."""
        if self._shows_progress:
            minutes, seconds = divmod(round(time.monotonic() - self._begun), 60)
            print(f"[{minutes}:{seconds:02}] {line}", file=sys.stderr, flush=True)

    def results(
        self,
        task: Task,
        *,
        device: str | None = None,
        folder: Path | None = None,
        tests: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> list[dict[str, Any]]:
        """Run a session; return what it found for each test.

        Raises:
            ReportError: if it ended without a result.
            subprocess.TimeoutExpired: if it takes longer than `timeout` seconds.
        """
        with TemporaryDirectory(prefix="pytest-cka-memory-repair-") as made:
            result = Path(task.result or Path(made, "found.json"))
            launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={task.ranks}")
            command = [
                *((sys.executable, "-m", *launcher) if task.ranks > 1 else (sys.executable,)),
                *("-m", "pytest", "-p", repair_session.__name__),
                *(self.arguments if tests is None else tests),
                *(f"--cka-memory-device={device or self.device}", "--cka-memory-report"),
                *("-q", "-p", "no:cacheprovider", "--no-header", "-W", "ignore"),
                *(("-n", "0") if find_spec("xdist") else ()),
            ]
            own = replace(task, result=str(result))
            shows = task.mode == SEARCH and self._shows_progress
            done = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {}), **repair_session.variables(own)},
                stdout=subprocess.PIPE,
                stderr=None if shows else subprocess.DEVNULL,
                text=True,
                errors="replace",
                cwd=folder,
            )
            output = _output(done, timeout)
            every = [_read(own.result_of(rank)) for rank in range(task.ranks)]
            if not all(every):
                print(*output.splitlines()[-_MOST_LINES:], sep="\n", file=sys.stderr)
                raise ReportError(
                    f"pytest ended with exit status {done.returncode} and ran no test; its output "
                    "is above. Correct the tests or the arguments of pytest"
                )
            tests_of_ranks = zip(*every, strict=True)
            return [{**of_ranks[0], "ranks": [*of_ranks]} for of_ranks in tests_of_ranks]


def _read(path: str) -> list[dict[str, Any]]:
    """Return what a session found for each test; nothing if it has written nothing."""
    file = Path(path)
    answer: list[dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.exists() else []
    return answer


def _output(process: "subprocess.Popen[str]", timeout: float | None) -> str:
    try:
        return process.communicate(timeout=timeout)[0]
    except KeyboardInterrupt:  # the session has it too, and writes what it knows
        return process.communicate()[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # so that torchrun ends its ranks
        try:
            process.communicate(timeout=_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise
