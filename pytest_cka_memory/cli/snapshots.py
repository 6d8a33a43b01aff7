"""``python -m pytest_cka_memory snapshot`` and ``replay``: recordings that torch has written."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from emulated_cuda.cards import CARDS, CONTEXT_BYTES
from pytest_cka_memory.errors import DeviceError, ReportError
from pytest_cka_memory.reports import files
from pytest_cka_memory.snapshots.reading import ALTERNATIVES
from pytest_cka_memory.units import parse_size


def add_parsers(commands: Any) -> None:
    """Add both commands to the subparsers of the command line."""
    snapshot = commands.add_parser(
        "snapshot",
        help="explain a file of torch.cuda.memory._dump_snapshot, or compare two of them",
        description="Explain the memory in a recording by torch. With two files, print the "
        "differences by line; with more, print a table.",
    )
    snapshot.add_argument("files", type=Path, nargs="+", metavar="FILE")
    snapshot.add_argument(
        "--html", type=Path, metavar="PAGE", help="also write an HTML page of one file"
    )
    snapshot.add_argument(
        "--json", type=Path, metavar="PATH", help="also write the figures to this file"
    )
    snapshot.set_defaults(run=_snapshot)

    replay = commands.add_parser(
        "replay",
        help=(
            "repeat the allocations of a memory snapshot on an emulated card, with other allocator "
            "settings"
        ),
        description="Repeat the requests of a recording with torch's own allocator on an emulated "
        "card, with the recorded settings and with others, and print how much memory each takes.",
    )
    replay.add_argument("file", type=Path, metavar="FILE")
    card = replay.add_mutually_exclusive_group()
    card.add_argument("--card", choices=CARDS, help="show which settings fit this card")
    card.add_argument(
        "--memory",
        metavar="SIZE",
        help="show which settings fit a card with this much memory, for example 24GB",
    )
    replay.add_argument(
        "--try",
        dest="settings",
        nargs="+",
        metavar="SETTING",
        help=f"values of PYTORCH_ALLOC_CONF to try; default: {' '.join(ALTERNATIVES)}",
    )
    replay.add_argument("--device", type=int, metavar="N", help="only this device of the file")
    replay.add_argument(
        "--json", type=Path, metavar="PATH", help="also write the figures to this file"
    )
    replay.set_defaults(run=_replay)
    for parser in (snapshot, replay):
        parser.add_argument(
            "--full-paths",
            action="store_true",
            help="show full paths as recorded, with the names of users and folders",
        )


def _snapshot(args: argparse.Namespace) -> int:
    from pytest_cka_memory.snapshots import reading, snapshot_text

    _refuse_inputs(args.files, args.html, "--html")
    _refuse_inputs(args.files, args.json, "--json")
    read = [
        snapshot_text.read_all(reading.read(path), full_paths=args.full_paths)
        for path in args.files
    ]
    if args.html is not None:
        from pytest_cka_memory.snapshots import page

        if len(read) > 1:
            raise ReportError("--html: a page shows one file; write only one FILE")
        files.write_whole(args.html, page.render(read[0]))
    if args.json is not None:
        _write_json(args.json, [snapshot_text.as_data(each) for each in read])
    for line in snapshot_text.text(read):
        print(line)
    return 0


def _replay(args: argparse.Namespace) -> int:
    from pytest_cka_memory.snapshots import analysis, reading, replay_text, trials
    from pytest_cka_memory.snapshots.analysis import Lines

    _refuse_inputs([args.file], args.json, "--json")
    usable, card = _card(args)
    snapshot = reading.read(args.file)
    devices = [
        device
        for device in snapshot.devices
        if device.actions and args.device in (None, device.index)
    ]
    if not devices:
        raise ReportError(
            f"cannot replay {args.file}: it has no events"
            + ("" if args.device is None else f" of device {args.device}")
            + "; record them with torch.cuda.memory._record_memory_history() at the program's start"
        )
    lines = Lines(snapshot, full_paths=args.full_paths)
    data = []
    for number, device in enumerate(devices):
        state = analysis.analysed(snapshot, device) if device.is_of_refusal else None
        if state is not None:
            data.append(replay_text.data_at_refusal(args.file.name, state))
            print(*replay_text.lines_at_refusal(args.file.name, state, usable, card), sep="\n")
            continue
        print(f"replaying cuda:{device.index}", file=sys.stderr, flush=True)
        attempts = trials.tried(snapshot, device, args.settings or ALTERNATIVES, usable)
        data.append(replay_text.as_data(attempts))
        for line in ["", *replay_text.lines(attempts, lines, card)][not number :]:
            print(line)
    if args.json is not None:
        _write_json(args.json, data)
    return 0


def _card(args: argparse.Namespace) -> tuple[int | None, str]:
    """Return what a program can have of the card, and its name."""
    if args.card:
        return CARDS[args.card].total_bytes - CONTEXT_BYTES, CARDS[args.card].title
    if not args.memory:
        return None, ""
    usable = parse_size(args.memory) - CONTEXT_BYTES
    if usable <= 0:
        raise DeviceError(
            f"--memory: {args.memory} is less than the {CONTEXT_BYTES >> 20} MB of a CUDA context; "
            "write, for example, 24GB"
        )
    return usable, f"a card of {args.memory}"


def _refuse_inputs(sources: list[Path], target: Path | None, option: str) -> None:
    for source in sources:
        if target is not None and target.exists() and source.exists() and target.samefile(source):
            raise ReportError(f"{option}: {target} is the input file itself; write another path")


def _write_json(path: Path, data: Any) -> None:
    files.write_whole(path, json.dumps(data, indent=1) + "\n")
