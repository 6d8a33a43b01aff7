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
from pytest_cka_memory.snapshots.settings import ALTERNATIVES
from pytest_cka_memory.units import parse_size


def add_parsers(commands: Any) -> None:
    """Add both commands to the subparsers of the command line."""
    snapshot = commands.add_parser(
        "snapshot",
        help="explain what torch.cuda.memory._dump_snapshot wrote; two files: what differs",
        description="Print what a recording of torch says about memory. With two files, what "
        "differs, by line; with more, a table.",
    )
    snapshot.add_argument("files", type=Path, nargs="+", metavar="FILE")
    snapshot.add_argument("--html", type=Path, metavar="PAGE", help="write a page of one file too")
    snapshot.add_argument("--json", type=Path, metavar="PATH", help="write the figures too")
    snapshot.set_defaults(run=_snapshot)

    replay = commands.add_parser(
        "replay",
        help="replay a recording of torch on an emulated card under other allocator settings",
        description="Make the requests of a recording to torch's own allocator on an emulated "
        "card, as they were and under other settings, and print what each takes.",
    )
    replay.add_argument("file", type=Path, metavar="FILE")
    card = replay.add_mutually_exclusive_group()
    card.add_argument("--card", choices=CARDS, help="say what fits this card")
    card.add_argument("--memory", metavar="SIZE", help="say what fits a card of 24GB, for example")
    replay.add_argument(
        "--try",
        dest="settings",
        nargs="+",
        metavar="SETTING",
        help=f"texts of PYTORCH_ALLOC_CONF; default: {' '.join(ALTERNATIVES)}",
    )
    replay.add_argument("--device", type=int, metavar="N", help="only this device of the file")
    replay.add_argument("--json", type=Path, metavar="PATH", help="write the figures too")
    replay.set_defaults(run=_replay)
    for parser in (snapshot, replay):
        parser.add_argument(
            "--full-paths",
            action="store_true",
            help="show paths as the file has them, with names of people and folders",
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
            raise ReportError("--html: a page has one file; write one FILE")
        files.write_whole(args.html, page.render(read[0]))
    if args.json is not None:
        _write_json(args.json, [snapshot_text.as_data(each) for each in read])
    for line in snapshot_text.text(read):
        print(line)
    return 0


def _replay(args: argparse.Namespace) -> int:
    from pytest_cka_memory.snapshots import analysis, reading, replay_text, trials
    from pytest_cka_memory.snapshots.lines import Lines

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
