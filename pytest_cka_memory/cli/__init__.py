"""The commands of ``python -m pytest_cka_memory``, and the sessions of pytest that they start."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from emulated_cuda.this_process import ending_with_this_process
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.plugin import repair_session
from pytest_cka_memory.plugin.repair_session import SEARCH, Task

_MOST_LINES = 40
_TO_END = 40.0
"""Seconds in which a session must end that took too long; torchrun gives its ranks 30."""
_MOST_WAIT = 4
"""How many times its limit a session may take where other programs use the processors."""
_BETWEEN_LOOKS = 1.0
"""Seconds between looks at the processor time of a session whose limit has passed."""


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
            subprocess.TimeoutExpired: if it takes longer than `timeout` seconds, in wall time and
                in processor time, or several times as long in wall time.
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
                start_new_session=True,  # so that all that it starts has a group, and can be ended
                preexec_fn=ending_with_this_process() if sys.platform == "linux" else None,
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


def _output(process: "subprocess.Popen[str]", seconds: float | None) -> str:
    """Return what a session prints; end it if anything goes wrong meanwhile.

    Raises:
        subprocess.TimeoutExpired: if it takes longer than `seconds`.
    """
    try:
        try:
            return _communicate(process, seconds)
        except KeyboardInterrupt:  # the session writes what it knows
            _send(process, "SIGINT")  # it is in another group than this process
            return process.communicate()[0]
    except BaseException:
        _end(process)
        raise


def _communicate(process: "subprocess.Popen[str]", seconds: float | None) -> str:
    """Return what a session prints.

    Where processors are shared, it has more time: until it has had `seconds` of a processor.
    """
    if seconds is None:
        return process.communicate()[0]
    begun, wait = time.monotonic(), seconds
    while True:
        try:
            return process.communicate(timeout=wait)[0]
        except subprocess.TimeoutExpired:
            left = _MOST_WAIT * seconds - (time.monotonic() - begun)
            if left <= 0 or _processor_seconds(process.pid, seconds) >= seconds:
                raise subprocess.TimeoutExpired(process.args, seconds) from None
            wait = min(left, _BETWEEN_LOOKS)


def _processor_seconds(process: int, otherwise: float) -> float:
    """Return the processor time of a process and its descendants; `otherwise` if not on Linux."""
    if sys.platform != "linux":
        return otherwise
    ticks, parents = Counter[int](), {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            # The name of the program, in parentheses, may have spaces.
            _, parent, *rest = file.read_text("utf-8", "replace").rpartition(")")[2].split()
            number = int(file.parent.name)
            parents[number] = int(parent)
            ticks[number] = sum(map(int, rest[9:13]))  # with those of children that have ended
    known, descendants = set[int](), {process}
    while descendants:
        known |= descendants
        descendants = {each for each, parent in parents.items() if parent in descendants}
    return sum(ticks[each] for each in known) / os.sysconf("SC_CLK_TCK")


def _end(process: "subprocess.Popen[str]") -> None:
    """End a session with what it has started."""
    _send(process, "SIGTERM")  # torchrun ends its ranks then, which have groups of their own
    with suppress(subprocess.TimeoutExpired):
        process.wait(_TO_END)
    _send(process, "SIGKILL")
    process.wait()


def _send(process: "subprocess.Popen[str]", name: str) -> None:
    """Send a signal to a session and the others of its group; on Windows, end it."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, getattr(signal, name))
    elif name != "SIGINT":  # Ctrl-C reaches it there by itself
        process.kill()
