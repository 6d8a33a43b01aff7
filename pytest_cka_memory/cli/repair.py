"""``python -m pytest_cka_memory repair``: run tests under changes that may lower their peak.

And prove what it recommends: patched copies run, and what they compute is compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulated_cuda.cards import CARDS
from emulated_cuda.torch_versions import allocator_variable
from pytest_cka_memory.errors import CkaMemoryError, ReportError, SizeError
from pytest_cka_memory.meters import EMULATED, is_emulated
from pytest_cka_memory.plugin import repair_session
from pytest_cka_memory.plugin.repair_session import MEASURE, SEARCH, VALUES, Task
from pytest_cka_memory.repair.programs import patched_copy
from pytest_cka_memory.units import format_exact, format_with_unit, parse_megabytes

if TYPE_CHECKING:
    from pytest_cka_memory.repair.proof import Difference
    from pytest_cka_memory.repair.smaller import Sizes

DEFAULT_CARD = "h100"
_EXPANDABLE = {allocator_variable(): "expandable_segments:True"}
_WORTH_A_RUN = 1.1
"""A reserve that is so many times the peak is measured again with expandable segments."""
_MOST_LINES = 40
_LARGEST = max(CARDS.values(), key=lambda card: card.total_bytes).name
SECONDS = 120.0
"""A run with values that takes longer is given up."""
_SCRIPT_TEST = "test_script.py"
_TO_END = 40.0
"""Seconds in which a session must end that took too long."""


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser(
        "repair",
        usage="%(prog)s TEST [TEST ...] [--card CARD [--devices N] | --device DEVICE] [--to SIZE] "
        "[--prove] [--html PAGE] [arguments of pytest ...]",
        help="try changes that may lower the peak memory of tests, and print the edits that do",
        description="Run tests again and again on an emulated card without values, each time with "
        "other changes, which are made without editing the code. Print how much memory "
        "each change saves, and the edits to make.",
        allow_abbrev=False,
    )
    parser.add_argument("--card", help=f"the emulated card; default: {DEFAULT_CARD}")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="emulate N cards, and also try to shard the model over them with fully_shard",
    )
    parser.add_argument(
        "--device",
        help="measure on this device instead of an emulated card: cpu, cuda, or a full name such "
        "as emulate:cuda:h100,values=off",
    )
    parser.add_argument(
        "--to",
        metavar="SIZE",
        help="the memory into which the tests must fit: 24GB, a number of MB, or a card",
    )
    parser.add_argument(
        "--prove",
        action="store_true",
        help="run patched copies of the code, and compare losses and gradients with the original",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="start no new trial after this many seconds of processor time; default: 20. A trial "
        "is stopped if it takes over a minute and over ten times as long as the test",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="PAGE",
        help="also write an HTML page with the memory before and after the changes",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run, takes_more=True)


def run(args: argparse.Namespace) -> int:
    """Run the search, print what it found, and return the exit status.

    Raises:
        ReportError: if pytest ended without a result.
        SizeError: if ``--to`` is neither a size nor a card.
    """
    if not args.more and not args.script:
        raise ReportError(
            "repair: no test is named; write e.g. repair tests/test_train.py::test_step, or "
            "repair train.py --batch 64 for a script with its arguments"
        )
    several = "" if args.devices is None else f",devices={args.devices}"
    device = args.device or f"{EMULATED}:{args.card or DEFAULT_CARD}{several},values=off"
    budget = args.to or args.card
    budget_bytes = None if budget is None else _budget(budget)
    label = " ".join(args.script)
    draws = args.html is not None
    task = Task("", SEARCH, budget_bytes, args.seconds, draws=draws, label=label)
    status = 0
    every = []
    with tempfile.TemporaryDirectory(prefix="pytest-cka-memory-script-") as made:
        arguments = args.more + ([_test_of(args.script, Path(made))] if args.script else [])
        session = Session(device, arguments, shows_progress=not args.quiet)
        for answer in _results(session, task, args.script, made):
            every.append(answer)
            print(answer.get("text") or f"{answer['label']}: {answer['error']}")
            status |= "text" not in answer
            for line in _about_reserve(session, answer):
                print(line)
            if args.prove and not answer.get("interrupted"):
                for line in proof_lines(session, answer):
                    print(line, flush=True)
    if args.html is not None:
        from pytest_cka_memory.reports import files
        from pytest_cka_memory.reports.html.page import render_repairs

        files.write_whole(args.html, render_repairs(every))
        print(f"wrote {args.html}")
    return status


def _test_of(script: Sequence[str], folder: Path) -> str:
    """Write a test that runs a script with its arguments; return its path."""
    path = folder / _SCRIPT_TEST
    arguments = f"{str(script[0])!r}, {list(script[1:])!r}"
    path.write_text(
        f"from pytest_cka_memory.repair.programs import Script\n\nrun = Script({arguments})\n\n\n"
        "def test_script():\n    run()\n",
        encoding="utf-8",
    )
    return str(path)


def _results(
    session: "Session", task: Task, script: Sequence[str], folder: str
) -> Iterator[dict[str, Any]]:
    """Yield what was found for each test: on the largest card if it does not fit the given one."""
    can_move = is_emulated(session.device) and _LARGEST not in session.device
    for first in session.results(replace(task, goes_on=not can_move)):
        # A test is named from pytest's root, which is another folder for a script.
        test = f"{folder}/{_SCRIPT_TEST}::test_script" if script else first["test"]
        label = " ".join(script) or test
        answer = first
        if first.get("ran_out"):
            print(f"{label} does not fit as it is; continuing on {_LARGEST}", file=sys.stderr)
            options = session.device.split(",")[1:]
            session.card_that_was_full = session.device
            session.device = ",".join([f"{EMULATED}:{_LARGEST}", *options])
            (answer,) = session.results(task, tests=[test])
        yield {**answer, "test": test, "label": label}


def _budget(text: str) -> int:
    from pytest_cka_memory.measure.repeated_runs import budget_of  # imports torch

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
        self.card_that_was_full: str | None = None
        """The device that was asked for, if the test did not fit it and another one is used."""
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


def _text_of(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in environment.items())


def _about_reserve(session: Session, answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about expandable segments, if the reserve is much larger than the peak."""
    peak, reserved = answer.get("peak_bytes"), answer.get("reserved_bytes")
    if not peak or not reserved or reserved < peak * _WORTH_A_RUN or answer.get("interrupted"):
        return
    again = session.results(Task("", MEASURE), tests=[answer["test"]], environment=_EXPANDABLE)[0]
    less = reserved - (again.get("reserved_bytes") or reserved)
    setting = _text_of(_EXPANDABLE)
    saves = f"saves {format_with_unit(less)} of" if less > 0 else "saves nothing of"
    yield f"reserve: {setting} {saves} {format_with_unit(reserved)}"


def proof_lines(session: Session, answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the proof of each recommended change has shown."""
    for each in answer.get("recommended", ()):
        if not each["files"]:
            yield f"not proven: {each['name']}: the place of the edit is not known"
            continue
        with tempfile.TemporaryDirectory(prefix="pytest-cka-memory-copy-") as made:
            folder = patched_copy(Path.cwd(), Path(made), each["files"])
            yield _about_peak(session, answer["test"], each, folder)
            if session.card_that_was_full is not None:
                yield _about_card(session, answer["test"], each, folder)
            yield _about_values(session, answer, each, folder)


def _about_peak(session: Session, test: str, each: Mapping[str, Any], folder: Path) -> str:
    cards = each["cards"]
    answer = _first(session, Task("", MEASURE, ranks=cards), folder=folder, tests=[test])
    errors = [rank["error"] for rank in answer.get("ranks", [answer]) if "error" in rank]
    if errors:
        return (
            f"not proven: {each['name']}: the patched copy does not run: {errors[0]}"
            f"{_by_hand(session, test, cards)}"
        )
    measured, predicted = [rank["peak_bytes"] for rank in answer["ranks"]], each["peak_bytes"]
    subject = "the patched copy has" if cards == 1 else f"each of {cards} ranks of the copy has"
    if set(measured) == {predicted}:
        return f"proven: {each['name']}: {subject} the peak {format_exact(predicted)}"
    peaks = ", ".join(map(format_exact, measured))
    return (
        f"not proven: {each['name']}: {'the patched copy has' if cards == 1 else 'ranks have'} the "
        f"peak {peaks}, but {format_exact(predicted)} were predicted"
    )


def _about_card(session: Session, test: str, each: Mapping[str, Any], folder: Path) -> str:
    """Say whether the copy runs on the card itself, whose allocator may need more than the peak."""
    device = session.card_that_was_full
    task = Task("", MEASURE, ranks=each["cards"])
    answer = _first(session, task, folder=folder, tests=[test], device=device)
    if "error" in answer:
        return (
            f"not proven: {each['name']}: on {device}: {answer['error'][:160]}. If its reserved "
            f"memory is fragmented, {_text_of(_EXPANDABLE)} helps"
        )
    peak = format_with_unit(answer["peak_bytes"])
    return (
        f"proven: {each['name']}: the patched copy runs on {device}, with a peak of {peak} and "
        f"{format_with_unit(answer['reserved_bytes'])} reserved"
    )


def _by_hand(session: Session, test: str, cards: int) -> str:
    """Return how to measure ranks without this command; nothing if there are none."""
    if cards == 1:
        return ""
    return (
        f"; write the patch and run: torchrun --standalone --nproc-per-node={cards} -m pytest "
        f"--cka-memory-report --cka-memory-device={session.device} {test}"
    )


def _about_values(
    session: Session, answer: Mapping[str, Any], each: Mapping[str, Any], folder: Path
) -> str:
    from pytest_cka_memory.repair.proof import difference
    from pytest_cka_memory.repair.smaller import Sizes, instead_of, sizes_to_try

    before, cards = Sizes(*answer["sizes"]), each["cards"]
    needed = {
        "peak_bytes": cards * (answer.get("peak_bytes") or 0),
        "flops": cards * (answer.get("flops") or 0),
    }
    error = ""
    for sizes in sizes_to_try(before, **needed, seconds=SECONDS):
        kept = _kept(session, answer["test"], folder, before, sizes, cards)
        if isinstance(kept, str):
            error = error or kept
            continue
        try:
            result = difference(*kept)
        except ValueError as differing:
            return f"results: they differ: {differing}"
        smaller = "" if sizes == before else f"; with {instead_of(before, sizes)}"
        return _compared(each, result, smaller)
    return f"results not compared: {error}"


def _kept(
    session: Session, test: str, folder: Path, before: "Sizes", sizes: "Sizes", cards: int
) -> list[str] | str:
    """Return the files with the values before and after, of all ranks; or why there are none."""
    device = session.device.replace(",values=off", "")
    kept: list[str] = []
    for place, name, ranks in ((None, "before", 1), (folder, "after", cards)):
        task = Task(
            str(folder / f"{name}-{sizes.batch}-{sizes.tokens}.json"),
            VALUES,
            sizes=(astuple(before), astuple(sizes)),
            ranks=ranks,
        )
        answer = _first(session, task, folder=place, tests=[test], device=device, timeout=SECONDS)
        every = answer.get("ranks", [answer])
        errors = [str(rank["error"]) for rank in every if "error" in rank]
        if errors:
            return errors[0]
        if sizes != before and not answer["shrunk"]:
            return "the sizes of the test's inputs could not be made smaller"
        kept += [rank["values"] for rank in every]
    return kept


def _compared(each: Mapping[str, Any], result: "Difference", smaller: str) -> str:
    from pytest_cka_memory.repair.proof import MOST_ROUNDING

    if not result.compared:
        return "results not compared: the test has no loss, gradient or result of a model"
    compared = f"{result.compared} losses, gradients and results compared{smaller}"
    if result.is_equal:
        return f"results: equal, bit for bit ({compared})"
    largest = f"by at most {result.largest:.1e} of the largest element, in the {result.where}"
    if "change" in each["numbers"]:
        return (
            f"results: they differ {largest}, as this change allows: {each['numbers']} ({compared})"
        )
    if each["numbers"] and result.largest <= MOST_ROUNDING:
        return f"results: the last digits differ, {largest} ({compared})"
    return f"results: THEY DIFFER, which was not promised: {largest} ({compared})"


def _first(session: Session, task: Task, **options: Any) -> dict[str, Any]:
    try:
        answers: Sequence[dict[str, Any]] = session.results(task, **options)
    except subprocess.TimeoutExpired as error:
        return {"error": f"it takes longer than {error.timeout:.0f} s"}
    except CkaMemoryError as error:
        return {"error": str(error)}
    return answers[0]


__all__ = ["MEASURE", "VALUES", "Session", "add_parser", "run"]
