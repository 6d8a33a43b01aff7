"""``python -m pytest_cka_memory repair``: run tests under changes that may lower their peak.

And prove what it recommends: patched copies run, and what they compute is compared.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emulated_cuda.cards import CARDS, LARGEST_CARD
from emulated_cuda.torch_versions import allocator_variable
from pytest_cka_memory.cli import Session
from pytest_cka_memory.errors import CkaMemoryError, ReportError, SizeError
from pytest_cka_memory.meters import EMULATED, is_emulated
from pytest_cka_memory.plugin.repair_session import MEASURE, SEARCH, VALUES, Task
from pytest_cka_memory.repair import budget_of
from pytest_cka_memory.repair.programs import check_named_files, patched_copy
from pytest_cka_memory.units import format_exact, format_with_unit, parse_megabytes

if TYPE_CHECKING:
    from pytest_cka_memory.repair.proof import Difference
    from pytest_cka_memory.repair.smaller import Sizes

DEFAULT_CARD = "h100"
_EXPANDABLE = {allocator_variable(): "expandable_segments:True"}
_WORTH_A_RUN = 1.1
"""A reserve that is so many times the peak is measured again with expandable segments."""
_SCRIPT_TEST = "test_script.py"


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
    parser.add_argument(
        "--card",
        choices=CARDS,
        metavar="CARD",
        help=f"the emulated card; default: {DEFAULT_CARD}; known: {', '.join(CARDS)}",
    )
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
        help="run patched copies of the code, and compare losses and gradients with the original; "
        "exit with status 1 if no change is proven",
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="CHANGE",
        help="also say how to write this row of the table, and prove it with --prove; may be given "
        "several times, e.g. --also 'checkpoint every Block'. A combination of rows is tried, e.g. "
        "--also 'checkpoint every Block + del logits'",
    )
    parser.add_argument(
        "--proof-seconds",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="with --prove: give up a run with values that takes longer, in wall time and in "
        "processor time, or four times as long in wall time; default: 120",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="start no new trial after this many seconds of processor time; default: 20, or as "
        "long as a hundred runs of the test take, but at most 300. A trial is stopped if it takes "
        "over a minute and over ten times as long as the test",
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
        ReportError: if no test is named, or a file that does not exist, or if pytest ended without
            a result.
        SizeError: if ``--to`` is neither a size nor a card.
    """
    if not args.more and not args.script:
        raise ReportError(
            "repair: no test is named; write e.g. repair tests/test_train.py::test_step, or "
            "repair train.py --batch 64 for a script with its arguments"
        )
    check_named_files(args.more)
    several = "" if args.devices is None else f",devices={args.devices}"
    device = args.device or f"{EMULATED}:{args.card or DEFAULT_CARD}{several},values=off"
    budget = args.to or args.card
    budget_bytes = None if budget is None else _budget(budget)
    label = " ".join(args.script)
    draws = args.html is not None
    also = tuple(args.also)
    task = Task("", SEARCH, budget_bytes, args.seconds, draws=draws, label=label, also=also)
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
                status |= not Proof(session, answer, args.proof_seconds).is_held()
    if args.html is not None:
        from pytest_cka_memory.reports import files
        from pytest_cka_memory.reports.html.page import render_repairs

        files.write_whole(args.html, render_repairs(every))
        print(f"wrote {args.html}")
    return status


def _test_of(script: Sequence[str], folder: Path) -> str:
    """Write a test that runs a script with its arguments; return its path."""
    path = folder / _SCRIPT_TEST
    # What the script saves is removed with this folder, also if its process is killed.
    arguments = f"{str(script[0])!r}, {list(script[1:])!r}, {str(folder)!r}"
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
    can_move = is_emulated(session.device) and LARGEST_CARD not in session.device
    for first in session.results(replace(task, goes_on=not can_move)):
        # A test is named from pytest's root, which is another folder for a script.
        test = f"{folder}/{_SCRIPT_TEST}::test_script" if script else first["test"]
        label = " ".join(script) or test
        answer = first
        if first.get("ran_out"):
            print(f"{label} does not fit as it is; continuing on {LARGEST_CARD}", file=sys.stderr)
            options = session.device.split(",")[1:]
            session.card_that_was_full = session.device
            session.device = ",".join([f"{EMULATED}:{LARGEST_CARD}", *options])
            (answer,) = session.results(task, tests=[test])
        yield {**answer, "test": test, "label": label}


def _budget(text: str) -> int:
    try:
        return budget_of(text, parse_megabytes)
    except SizeError as error:
        raise SizeError(f"--to: {error}") from None


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


class Proof:
    """Runs patched copies of what was searched, and prints what each of them shows.

    Args:
        session: starts the copies.
        answer: of the search.
        seconds: a run with values that takes longer is given up.
    """

    def __init__(self, session: Session, answer: Mapping[str, Any], seconds: float) -> None:
        self._session, self._answer, self._seconds = session, answer, seconds
        self._test: str = answer["test"]

    def is_held(self) -> bool:
        """Print the proof of each recommended change; return whether one holds, or none is needed.

        If none does, the next ones that fit are proven until one does. Those that the user has
        named must hold, too.
        """
        recommended = self._answer.get("recommended", ())
        holding = [each["name"] for each in recommended if self._holds(each)]
        known = [each["name"] for each in recommended]
        also = [each for each in self._answer.get("also", ()) if each["name"] not in known]
        results = [self._holds(each) for each in also]
        are_held = all(results)
        if holding or self._answer.get("fits_as_it_is"):
            return are_held
        if not recommended:
            return are_held and self._answer.get("budget_bytes") is None
        for each in self._answer.get("next", ()):
            print(f"none of these is proven; the next change that fits: {each['text']}")
            if self._holds(each):
                return are_held
        return False

    def _holds(self, change: Mapping[str, Any]) -> bool:
        """Print the proof of a change; return whether it was contradicted nowhere."""
        if not change["files"]:
            print(f"not proven: {change['name']}: the place of the edit is not known")
            return False
        with tempfile.TemporaryDirectory(prefix="pytest-cka-memory-copy-") as made:
            folder = patched_copy(Path.cwd(), Path(made), change["files"])
            for find in (self.peak, self.fit_on_card, self._results):
                line, holds = find(change, folder)
                if line:
                    print(line, flush=True)
                if not holds:
                    return False
        return True

    def peak(self, change: Mapping[str, Any], folder: Path) -> tuple[str, bool]:
        """Compare the peak of the copy with the predicted one."""
        name, cards = change["name"], change["cards"]
        self._session.show(f"proving {name}: the peak of a patched copy")
        answer = self._run(Task("", MEASURE, ranks=cards), folder)
        errors = [rank["error"] for rank in answer.get("ranks", [answer]) if "error" in rank]
        if errors:
            return (
                f"not proven: {name}: the patched copy does not run: {errors[0]}"
                f"{self._by_hand(cards)}"
            ), False
        measured, predicted = [rank["peak_bytes"] for rank in answer["ranks"]], change["peak_bytes"]
        subject = "the patched copy has" if cards == 1 else f"each of {cards} ranks of the copy has"
        if set(measured) == {predicted}:
            return f"proven: {name}: {subject} the peak {format_exact(predicted)}", True
        peaks = ", ".join(map(format_exact, measured))
        return (
            f"not proven: {name}: {'the patched copy has' if cards == 1 else 'ranks have'} the "
            f"peak {peaks}, but {format_exact(predicted)} were predicted"
        ), False

    def fit_on_card(self, change: Mapping[str, Any], folder: Path) -> tuple[str, bool]:
        """Run the copy on the card that was full, whose allocator may need more than the peak."""
        device, name = self._session.card_that_was_full, change["name"]
        if device is None:
            return "", True
        self._session.show(f"proving {name}: on {device}")
        answer = self._run(Task("", MEASURE, ranks=change["cards"]), folder, device=device)
        if "error" in answer:
            return (
                f"not proven: {name}: on {device}: {_beginning(answer['error'])} If its reserved "
                f"memory is fragmented, {_text_of(_EXPANDABLE)} helps"
            ), False
        peak = format_with_unit(answer["peak_bytes"])
        return (
            f"proven: {name}: the patched copy runs on {device}, with a peak of {peak} and "
            f"{format_with_unit(answer['reserved_bytes'])} reserved"
        ), True

    def _by_hand(self, cards: int) -> str:
        """Return how to measure ranks without this command; nothing if there are none."""
        if cards == 1:
            return ""
        return (
            f"; write the patch and run: torchrun --standalone --nproc-per-node={cards} -m pytest "
            f"--cka-memory-report --cka-memory-device={self._session.device} {self._test}"
        )

    def _results(self, change: Mapping[str, Any], folder: Path) -> tuple[str, bool]:
        """Compare what the copy computes with what the original does."""
        from pytest_cka_memory.repair.proof import difference
        from pytest_cka_memory.repair.smaller import Sizes, instead_of, sizes_to_try

        answer, before, cards = self._answer, Sizes(*self._answer["sizes"]), change["cards"]
        needed = {
            "peak_bytes": cards * (answer.get("peak_bytes") or 0),
            "flops": cards * (answer.get("flops") or 0),
        }
        error = ""
        for sizes in sizes_to_try(before, **needed, seconds=self._seconds):
            smaller = "" if sizes == before else f"; with {instead_of(before, sizes)}"
            self._session.show(
                f"proving {change['name']}: its results{smaller}, in at most {self._seconds:.0f} s"
            )
            kept = self._kept(folder, before, sizes, cards)
            if isinstance(kept, str):
                error = error or kept
                if kept.startswith(_CRASHED):
                    return f"not proven: {change['name']}: {kept}", False
                continue
            try:
                result = difference(*kept)
            except ValueError as differing:
                return f"results: they differ: {differing}", False
            return _compared(change, result, smaller)
        return f"results not compared: {error}", True

    def _kept(self, folder: Path, before: "Sizes", sizes: "Sizes", cards: int) -> list[str] | str:
        """Return the files with the values before and after, of all ranks; or why none exist."""
        device = self._session.device.replace(",values=off", "")
        kept: list[str] = []
        for place, name, ranks in ((None, "before", 1), (folder, "after", cards)):
            task = Task(
                str(folder / f"{name}-{sizes.batch}-{sizes.tokens}.json"),
                VALUES,
                sizes=(astuple(before), astuple(sizes)),
                ranks=ranks,
            )
            answer = self._run(task, place, device=device, timeout=self._seconds)
            every = answer.get("ranks", [answer])
            errors = [str(rank["error"]) for rank in every if "error" in rank]
            if errors:
                is_limit = answer.get("gave_up") or "out of memory" in errors[0].lower()
                return errors[0] if name == "before" or is_limit else f"{_CRASHED}: {errors[0]}"
            if sizes != before and not answer["shrunk"]:
                return "the sizes of the test's inputs could not be made smaller"
            kept += [rank["values"] for rank in every]
        return kept

    def _run(self, task: Task, folder: Path | None, **options: Any) -> dict[str, Any]:
        try:
            answers = self._session.results(task, folder=folder, tests=[self._test], **options)
        except subprocess.TimeoutExpired as error:
            return {
                "error": f"with values it takes longer than {error.timeout:.0f} s; give it more "
                "with --proof-seconds, or name a smaller test or smaller arguments of the script",
                "gave_up": True,
            }
        except CkaMemoryError as error:
            return {"error": str(error)}
        return answers[0]


_CRASHED = "the patched copy fails with values"
_LONGEST_BEGINNING = 200


def _beginning(message: str) -> str:
    """Return the first sentences of a message, the last of them with its full stop."""
    first, *rest = message.rstrip(".").split(". ")
    for sentence in rest:
        if len(first) + len(sentence) > _LONGEST_BEGINNING:
            break
        first += f". {sentence}"
    return f"{first}."


def _compared(change: Mapping[str, Any], result: "Difference", smaller: str) -> tuple[str, bool]:
    """Say how results differ, and whether the change promised that they may."""
    from pytest_cka_memory.repair.proof import MOST_ROUNDING

    if not result.compared:
        return "results not compared: the test has no loss, gradient or result of a model", True
    compared = f"{result.compared} losses, gradients and results compared{smaller}"
    if result.is_equal:
        return f"results: equal, bit for bit ({compared})", True
    largest = f"by at most {result.largest:.1e} of the largest element, in the {result.where}"
    numbers = change["numbers"]
    if "change" in numbers:
        return (
            f"results: they differ {largest}, as this change allows: {numbers} ({compared})",
            True,
        )
    if numbers and result.largest <= MOST_ROUNDING:
        return f"results: the last digits differ, {largest} ({compared})", True
    return f"results: THEY DIFFER, which was not promised: {largest} ({compared})", False
