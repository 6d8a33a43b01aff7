"""Run programs whose recording is beside them, and compare what they ask the allocator for.

    python benchmarks/real_cards/recorded.py FOLDER [NAME ...] [--interpreter PYTHON ...]

People keep programs, and what ``torch.cuda.memory._dump_snapshot`` wrote when these ran on their
cards, in one repository. ``FOLDER`` has such repositories as git has them: ``OWNER+NAME`` with
the git directory in it, or ``OWNER+NAME.git``. Nothing of them is in this repository:
``programs_with_recordings.py`` names the commits, files and arguments. Each program runs as it is
on an emulated card, in a process that does not get the recording; then its requests and frees are
compared with the recorded ones, in order.
"""

import argparse
import difflib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import run
from programs_with_recordings import PROGRAMS, Program
from sources import git_directory

from pytest_cka_memory.snapshots import beginning
from pytest_cka_memory.snapshots.reading import (
    ALLOC,
    FREE_REQUESTED,
    INACTIVE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    Device,
    read,
)

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results" / "recorded-programs.json"
LIMIT_S = 600
_MOST_DIFFERENCES = 8
_FIGURES = (
    "start_reserved_bytes",
    "peak_reserved_bytes",
    "reserved_bytes",
    "used_bytes",
    "requested_bytes",
)


@dataclass(frozen=True)
class Requests:
    """What a recording has of one device."""

    events: list[tuple[str, int, int]]
    """Of each request and free: which it is, its bytes, and for a free how many requests before it
    the block came from; -1 if the recording began later."""
    reserves: list[int]
    """The bytes reserved after each request and free."""
    start_reserved_bytes: int
    start_blocks: Counter[int]
    """How many blocks of each size were in use when the recording began."""
    reserved_bytes: int
    used_bytes: int
    """Of whole blocks. A large block is not split if 1 MB or less would be left of it."""
    requested_bytes: int
    """What was asked for of these blocks, rounded as the allocator rounds it."""

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest reserve while it was recorded."""
        return max([self.start_reserved_bytes, *self.reserves])


def requests_of(path: Path) -> Requests:
    """Return the requests and frees of a recording of one device.

    Raises:
        SystemExit: if it has several devices, or expandable segments.
    """
    snapshot = read(path)
    if len(snapshot.devices) != 1:
        raise SystemExit(f"{path}: {len(snapshot.devices)} devices; only one is compared")
    (device,) = snapshot.devices
    began = beginning.beginning_of(device)
    blocks = Counter(
        beginning.rounded(block.requested_bytes or block.bytes)
        for segment in began.segments
        for block in segment.blocks
    )
    in_use = [b for s in device.segments for b in s.blocks if b.state != INACTIVE]
    return Requests(
        *_followed(device, began.reserved_bytes),
        began.reserved_bytes,
        blocks,
        sum(segment.bytes for segment in device.segments),
        sum(block.bytes for block in in_use),
        sum(beginning.rounded(block.requested_bytes) for block in in_use),
    )


def _followed(device: Device, reserved: int) -> tuple[list[tuple[str, int, int]], list[int]]:
    events: list[tuple[str, int, int]] = []
    reserves: list[int] = []
    made_by: dict[int, int] = {}
    for event in device.events():
        if event.action == ALLOC:
            made_by[event.address] = len(events)
            events.append(("request", event.bytes, 0))
        elif event.action == FREE_REQUESTED:
            made = made_by.pop(event.address, -1)
            events.append(("free", event.bytes, -1 if made < 0 else len(events) - made))
        elif event.action in (SEGMENT_ALLOC, SEGMENT_FREE):
            # The allocator notes the segment before the request for which it takes it.
            reserved += event.bytes if event.action == SEGMENT_ALLOC else -event.bytes
            continue
        else:
            continue
        reserves.append(reserved)
    return events, reserves


def compared(card: Requests, here: Requests) -> dict[str, Any]:
    """Return how the requests of an emulated card differ from those of the card."""
    equal = _equal_from_the_start(here.events, card.events)
    is_equal = in_any_order(here.events) == in_any_order(card.events)
    row: dict[str, Any] = {
        "events": len(card.events),
        "events_here": len(here.events),
        "equal_events": equal,
        "equal_but_for_order_of_frees": is_equal,
        "differences": [] if is_equal else _differences(card, here),
    }
    if is_equal:
        pairs = list(zip(card.reserves, here.reserves, strict=True))
        row["equal_reserves"] = sum(ours == theirs for ours, theirs in pairs)
    more, fewer = card.start_blocks - here.start_blocks, here.start_blocks - card.start_blocks
    row["start_blocks_only_on_card"] = sorted(more.elements())
    row["start_blocks_only_here"] = sorted(fewer.elements())
    for name in _FIGURES:
        row[name] = getattr(card, name)
        row[f"{name}_here"] = getattr(here, name)
    return row


def _equal_from_the_start(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def in_any_order(events: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return events with each row of frees sorted by the requests that they end.

    Autocast empties a table that is ordered by addresses of the host, and so at random.
    """
    found: list[tuple[str, int, int]] = []
    for kind, group in itertools.groupby(enumerate(events), lambda each: each[1][0]):
        rows = list(group)
        if kind == "free":
            first = rows[0][0]
            freed = [(at - made if made > 0 else -1, size) for at, (_, size, made) in rows]
            found += [("free", size, first - at) for at, size in sorted(freed)]
        else:
            found += [event for _, event in rows]
    return found


def _differences(card: Requests, here: Requests) -> list[dict[str, Any]]:
    """Return what only one of two sequences has, with where it is, the first ones only."""
    sizes = [event[:2] for event in card.events], [event[:2] for event in here.events]
    matcher = difflib.SequenceMatcher(None, *sizes, autojunk=False)
    found = [
        {"at": first, "card": sizes[0][first:last], "here": sizes[1][begin:end]}
        for kind, first, last, begin, end in matcher.get_opcodes()
        if kind != "equal"
    ]
    shown = [
        {**row, "card": row["card"][:_MOST_DIFFERENCES], "here": row["here"][:_MOST_DIFFERENCES]}
        for row in found[:_MOST_DIFFERENCES]
    ]
    return [*shown, {"more": len(found) - len(shown)}] if len(found) > len(shown) else shown


def extract(program: Program, git: Path, folder: Path) -> None:
    """Write the Python files of a program's repository into a folder, and edit them."""
    # Not "git archive": a copy of a repository may lack large files, and then that fails.
    command = ["git", f"--git-dir={git}"]
    listed = ["ls-tree", "-r", "-z", "--name-only", program.commit]
    names = subprocess.run([*command, *listed], check=True, stdout=subprocess.PIPE, text=True)
    for name in filter(lambda name: name.endswith(".py"), names.stdout.split("\0")):
        into = folder / name
        into.parent.mkdir(parents=True, exist_ok=True)
        with into.open("wb") as file:
            shown = [*command, "show", f"{program.commit}:{name}"]
            subprocess.run(shown, check=True, stdout=file)
    for path, before, after in program.edits:
        text = (folder / path).read_text("utf-8")
        if before not in text:
            raise SystemExit(f"{program.name}: {path} does not have {before!r}")
        (folder / path).write_text(text.replace(before, after), "utf-8")


def predict(
    program: Program, git: Path, interpreter: str, into: Path, *, from_start: bool = False
) -> dict[str, Any]:
    """Run a program on its emulated card; write its recording, return how long it took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        extract(program, git, folder)
        command = [interpreter, "-W", "ignore", "-m", "emulated_cuda"]
        options = ["--card", program.card, "--no-values"]
        one = [str(Path(__file__).with_name("recorded_one.py")), str(into), str(program.dump)]
        begin = time.monotonic()
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        given["FROM_START"] = str(int(from_start))
        try:
            done = subprocess.run(
                [*command, *options, *one, name, program.script, *program.arguments],
                env={**given, **program.environment},
                timeout=LIMIT_S,
                check=False,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took over {LIMIT_S} s"}
        if not into.exists():
            return {"failed": "\n".join((done.stderr + done.stdout).strip().splitlines()[-12:])}
    return {"seconds": round(time.monotonic() - begin, 1)}


def version_of(interpreter: str) -> str:
    """Return the version of torch that an interpreter has."""
    command = [interpreter, "-c", "import torch; print(torch.__version__)"]
    return subprocess.check_output(command, text=True).strip().partition("+")[0]


def one(program: Program, git: Path, interpreter: str) -> dict[str, Any]:
    """Run a program, and compare it with its recording; return the row of the result."""
    row: dict[str, Any] = {"program": program.name, "torch": version_of(interpreter)}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "here.pickle"
        found = predict(program, git, interpreter, here)
        if "failed" in found:
            print(found["failed"])
            return {**row, "failed": run.reason(found["failed"])}
        ours = requests_of(here)
        row = {**row, **found}
        card = Path(folder) / "card.pickle"
        source = f"{program.recorded_in or program.commit}:{program.recording}"
        with card.open("wb") as file:
            subprocess.run(["git", f"--git-dir={git}", "show", source], check=True, stdout=file)
        return {**row, **compared(requests_of(card), ours)}


def by_address_order(program: Program, git: Path, interpreter: str, count: int) -> list[int]:
    """Return the reserve at the end of a program if the card's addresses have other orders.

    Raises:
        SystemExit: if the program fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.pickle"
        found = predict(program, git, interpreter, whole, from_start=True)
        if "failed" in found:
            raise SystemExit(found["failed"])
        script = str(Path(__file__).with_name("address_orders.py"))
        done = subprocess.run(
            [interpreter, "-W", "ignore", script, str(whole), str(count)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    reserves: list[int] = json.loads(done.stdout)
    return reserves


def repeated(program: Program, git: Path, interpreter: str, count: int) -> list[int]:
    """Return the reserve at the end of each of several runs of a program.

    Raises:
        SystemExit: if one fails.
    """
    reserves = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            here = Path(folder) / f"{number}.pickle"
            found = predict(program, git, interpreter, here)
            if "failed" in found:
                raise SystemExit(found["failed"])
            reserves.append(requests_of(here).reserved_bytes)
    return reserves


def stored() -> dict[str, dict[str, Any]]:
    """Return the rows that were written before, by program."""
    rows = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    return {row["program"]: row for row in rows}


def write(rows: Mapping[str, Any]) -> None:
    """Write all rows, in the order of the programs."""
    ordered = [rows[program.name] for program in PROGRAMS if program.name in rows]
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def line(row: Mapping[str, Any]) -> str:
    """Return one row as a line."""
    if "failed" in row:
        return f"{row['program']}: {row['failed']}"
    reserve = row["reserved_bytes_here"] - row["reserved_bytes"]
    used = row["used_bytes_here"] - row["used_bytes"]
    return (
        f"{row['program']}: {row['equal_events']:,} of {row['events']:,} equal "
        f"({row['events_here']:,} here); reserved {row['reserved_bytes']:,} {reserve:+,}; "
        f"in use {row['used_bytes']:,} {used:+,}; {row['seconds']} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named programs, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of repositories")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--interpreter", nargs="+", default=[sys.executable])
    parser.add_argument(
        "--orders", type=int, help="add the reserve with addresses in as many orders"
    )
    parser.add_argument("--repeat", type=int, help="add the reserve of as many further runs")
    parser.add_argument("--json", type=Path, help="write here instead, as renew.py does")
    options = parser.parse_args(arguments)
    if options.json:
        global RESULTS
        RESULTS = options.json
    chosen = [p for p in PROGRAMS if not options.names or p.name.startswith(tuple(options.names))]
    for program in chosen:
        git = git_directory(options.folder, program.repository)
        interpreter = run.chosen(program, options.interpreter)
        if options.orders or options.repeat:
            varied = by_address_order if options.orders else repeated
            found = varied(program, git, interpreter, options.orders or options.repeat)
            row = stored()[program.name]
            name = "by_address_order" if options.orders else "repeated"
            row[name] = {"torch": version_of(interpreter), "reserved_bytes": found}
            write({**stored(), program.name: row})
            print(program.name, *found, flush=True)
            continue
        row = one(program, git, interpreter)
        write({**stored(), program.name: row})
        print(line(row), flush=True)
        for difference in row.get("differences", []):
            print("   ", difference, flush=True)


if __name__ == "__main__":
    main()
