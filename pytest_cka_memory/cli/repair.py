"""``python -m pytest_cka_memory repair``: run tests under changes that may lower their peak."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from emulated_cuda.cards import CARDS
from pytest_cka_memory.errors import ReportError, SizeError
from pytest_cka_memory.meters.device_names import EMULATED, is_emulated
from pytest_cka_memory.plugin import repair_session
from pytest_cka_memory.plugin.repair_session import MEASURE, SEARCH, VALUES, Task
from pytest_cka_memory.units import format_with_unit, parse_megabytes

DEFAULT_CARD = "h100"
_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
_WORTH_A_RUN = 1.1
"""A reserve that is so many times the peak is measured again with expandable segments."""
_MOST_LINES = 40
_LARGEST = max(CARDS.values(), key=lambda card: card.total_bytes).name


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "repair",
        usage="%(prog)s TEST [TEST ...] [--card CARD | --device DEVICE] [--to SIZE] [--prove] "
        "[--html PAGE] [arguments of pytest ...]",
        help="run tests under changes that may lower their peak, and print what to write",
        description="Run tests again and again on an emulated card without values, each time "
        "under other changes that need no edit. Print what each saves, and what to write.",
        allow_abbrev=False,
    )
    parser.add_argument("--card", help=f"the emulated card; default: {DEFAULT_CARD}")
    parser.add_argument("--device", help="another device: cpu, cuda, or emulate:cuda:... in full")
    parser.add_argument("--to", metavar="SIZE", help="what must suffice: 24GB, MB, or a card")
    parser.add_argument(
        "--prove",
        action="store_true",
        help="run the patched copies, and compare losses and gradients",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="begin no new trial after so many seconds of processor time; default: 20",
    )
    parser.add_argument(
        "--html", type=Path, metavar="PAGE", help="write a page too, with memory before and after"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run, takes_more=True)


def run(args: argparse.Namespace) -> int:
    """Run the search, print what it found, and return the exit status.

    Raises:
        ReportError: if pytest ended without a result.
        SizeError: if ``--to`` is neither a size nor a card.
    """
    if not args.more:
        raise ReportError(
            "repair: no test is named; write e.g. repair tests/test_train.py::test_step"
        )
    device = args.device or f"{EMULATED}:{args.card or DEFAULT_CARD},values=off"
    budget = args.to or args.card
    budget_bytes = None if budget is None else _budget(budget)
    task = Task("", SEARCH, budget_bytes, args.seconds, draws=args.html is not None)
    session = Session(device, args.more, shows_progress=not args.quiet)
    status = 0
    every = []
    for found in _results(session, task):
        every.append(found)
        print(found.get("text") or f"{found['test']}: {found['error']}")
        status |= "text" not in found
        for line in _about_reserve(session, found):
            print(line)
        if args.prove and not found.get("interrupted"):
            from pytest_cka_memory.cli import repair_proof

            for line in repair_proof.lines(session, found):
                print(line, flush=True)
    if args.html is not None:
        from pytest_cka_memory.reports import files
        from pytest_cka_memory.reports.html import repairs

        files.write_whole(args.html, repairs.render(every))
        print(f"wrote {args.html}")
    return status


def _results(session: "Session", task: Task) -> Iterator[dict[str, Any]]:
    """Yield what was found for each test: on the largest card if it does not fit the given one."""
    can_move = is_emulated(session.device) and _LARGEST not in session.device
    for found in session.results(replace(task, goes_on=not can_move)):
        if not found.get("ran_out"):
            yield found
            continue
        print(f"{found['test']} does not fit as it is; going on with {_LARGEST}", file=sys.stderr)
        session.device = f"{EMULATED}:{_LARGEST},values=off"
        yield from session.results(task, tests=[found["test"]])


def _budget(text: str) -> int:
    from pytest_cka_memory.measure.repairing import budget_of  # imports torch

    try:
        return budget_of(text)
    except SizeError:
        return parse_megabytes(text)


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
        self._shows_progress = shows_progress
        self.arguments = list(arguments)

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
        with tempfile.TemporaryDirectory(prefix="pytest-cka-memory-repair-") as made:
            result = Path(task.result or Path(made, "found.json"))
            command = [
                *(sys.executable, "-m", "pytest", "-p", repair_session.__name__),
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
            if not result.exists() or not (found := json.loads(result.read_text("utf-8"))):
                print(*output.splitlines()[-_MOST_LINES:], sep="\n", file=sys.stderr)
                raise ReportError(
                    f"pytest ended with exit status {done.returncode} and ran no test; its output "
                    "is above. Correct the tests or the arguments of pytest"
                )
            results: list[dict[str, Any]] = found
            return results


def _output(process: "subprocess.Popen[str]", timeout: float | None) -> str:
    try:
        return process.communicate(timeout=timeout)[0]
    except KeyboardInterrupt:  # the session has it too, and writes what it knows
        return process.communicate()[0]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


def _about_reserve(session: Session, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about expandable segments, if the reserve is much larger than the peak."""
    peak, reserved = found.get("peak_bytes"), found.get("reserved_bytes")
    if not peak or not reserved or reserved < peak * _WORTH_A_RUN or found.get("interrupted"):
        return
    again = session.results(Task("", MEASURE), tests=[found["test"]], environment=_EXPANDABLE)[0]
    less = reserved - (again.get("reserved_bytes") or reserved)
    setting = "PYTORCH_ALLOC_CONF=expandable_segments:True"
    saves = f"saves {format_with_unit(less)} of" if less > 0 else "saves nothing of"
    yield f"reserve: {setting} {saves} {format_with_unit(reserved)}"


__all__ = ["MEASURE", "VALUES", "Session", "add_parser", "run"]
