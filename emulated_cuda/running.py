"""``python -m emulated_cuda``: runs a program on emulated devices and says what memory it took."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from emulated_cuda import cards, loading, this_process, torch_versions
from emulated_cuda.cards import CARDS, DEFAULT_CARD, card_of
from emulated_cuda.errors import DeviceError
from emulated_cuda.loading import library, records
from emulated_cuda.loading.loaded import SNAPSHOT_SETTING, TRITON_DRIVER, link_driver
from emulated_cuda.loading.records import DeviceUse, ProcessUse, Refusal


def lines(processes: Sequence[ProcessUse]) -> Iterator[str]:
    """Yield one line for each device of each process."""
    if not processes:
        yield "no process allocated memory on a CUDA device"
    for process in processes:
        for device in process.devices:
            yield _line(process, device)
            if device.depends_on_events:
                yield _reserve_range(device)
            if device.ran_out and device.refusal is not None:
                yield _why(device.index, device.refusal)
            if _reserves_much_more(process, device):
                yield (
                    f"warning: on cuda:{device.index} more than twice as much was reserved as "
                    "tensors used at once. If no other library used the rest, free blocks were "
                    "too small or too far apart to be used again. Set "
                    f"{torch_versions.allocator_variable()}=expandable_segments:True, without "
                    "max_split_size_mb, so that the allocator can join free blocks"
                )


def _reserve_range(device: DeviceUse) -> str:
    """Return what the reserve is at least, is expected to be, and is at most."""
    late = device.late_reserved_bytes or 0
    lower, upper = sorted((late, device.reserved_bytes))
    return (
        f"on cuda:{device.index} the reserved memory depends on how early the card finishes the "
        f"work of its streams: at least {_mb(lower)}, expected {_mb(device.reserved_bytes)}, at "
        f"most {_mb(upper)}"
    )


_USUAL_FACTOR = 2
"""An allocator may reserve so many times what is in use."""
_LARGE_SHARE = 0.1
"""A reserve of less than this share of the card does no harm."""


def _reserves_much_more(process: ProcessUse, device: DeviceUse) -> bool:
    if device.allocated_bytes is None:
        return False
    return (
        device.reserved_bytes > _USUAL_FACTOR * device.allocated_bytes
        and device.reserved_bytes > _LARGE_SHARE * process.usable_bytes
    )


def _why(index: int, refusal: Refusal) -> str:
    """Return why an allocation was refused, and how to try other settings of the allocator."""
    missing = refusal.requested_bytes - refusal.left_bytes
    free, in_pools = refusal.free_bytes, refusal.free_in_pools_bytes
    if _is_fragmentation(refusal):
        largest = f"in blocks of at most {_mb(refusal.largest_free_bytes)}"
        cause = f"{_mb(free)} were free {largest} (fragmentation). {_TRY}"
    elif missing <= free + in_pools:
        cause = f"{_mb(in_pools)} were free, but only in private pools of CUDA graphs and MemPool"
    else:
        cause = f"only {_mb(free + in_pools)} were free"
    return (
        f"on cuda:{index}, an allocation of {_mb(refusal.requested_bytes)} was refused when "
        f"{_mb(refusal.left_bytes)} of the card were left. Of the reserved memory, "
        f"{_mb(refusal.in_use_bytes)} were in use and {cause}"
    )


def _is_fragmentation(refusal: Refusal) -> bool:
    """Whether enough was free, but in several pieces."""
    return refusal.requested_bytes - refusal.left_bytes <= refusal.free_bytes


_TRY = (
    "To try other settings of the allocator, record the program with python -m emulated_cuda "
    "--snapshot FILE and run python -m pytest_cka_memory replay FILE"
)


_RECORDING = "memory.pickle"


def what_to_do(
    arguments: Sequence[str], options: argparse.Namespace, processes: Sequence[ProcessUse]
) -> Iterator[str]:
    """Yield a line with the next commands for this program if a card was too small for it.

    For memory that is in pieces, the line that says so has them.

    Args:
        arguments: of the command line.
        options: the same, read.
        processes: what the program did.
    """
    refused = [each.refusal for process in processes for each in process.devices if each.ran_out]
    if all(refusal is not None and _is_fragmentation(refusal) for refusal in refused):
        return
    commands = []
    if not options.module:  # `repair` runs scripts and tests
        size = [f"--to={processes[0].usable_bytes >> 20}"] if options.memory else []
        several = [f"--devices={options.devices}"] if options.devices > 1 else []
        words = shlex.join(["--card", options.card, *several, *size, *options.program])
        commands.append(
            f"python -m pytest_cka_memory repair {words} shows which change of the program lowers "
            "the peak"
        )
    if options.snapshot is None:
        words = shlex.join(["--snapshot", _RECORDING, *arguments])
        commands.append(
            f"python -m emulated_cuda {words} and then python -m pytest_cka_memory snapshot "
            f"{_RECORDING} show which lines fill the card"
        )
    if commands:
        yield f"what to do: {'; '.join(commands)}"


def write_json(path: Path, processes: Sequence[ProcessUse]) -> None:
    """Write the same as a list of objects."""
    path.write_text(json.dumps(rows(processes), indent=2) + "\n", encoding="utf-8")


def rows(processes: Sequence[ProcessUse]) -> list[dict[str, Any]]:
    """Return one object for each device of each process, with sizes in bytes."""
    return [_row(process, device) for process in processes for device in process.devices]


def _line(process: ProcessUse, device: DeviceUse) -> str:
    rank = "" if process.rank is None else f"rank {process.rank}, "
    allocated = (
        "allocated unknown"
        if device.allocated_bytes is None
        else f"{_mb(device.allocated_bytes)} allocated"
    )
    return (
        f"{rank}{process.program}, cuda:{device.index}, emulated {process.card.title}: at most "
        f"{allocated}, {_mb(device.reserved_bytes)} reserved, of {_mb(process.usable_bytes)}: "
        f"{_result(process, device)}"
    )


def _result(process: ProcessUse, device: DeviceUse) -> str:
    missing = f"{_mb(device.missing_bytes)} more would have been needed"
    if device.ran_out:
        return f"out of memory: {missing} for this allocation; a larger card shows what all needs"
    if process.end is None:
        if device.missing_bytes:
            return f"fits; {_how_it_went_on(device)}"
        condition = cards.condition_to_fit(
            process.card,
            process.total_bytes - device.reserved_bytes,
            with_nccl=process.rank is not None,
        )
        return f"fits, {condition}" if condition else "fits"
    if process.end == records.STILL_RUNS:
        return "still running; it has fitted so far"
    ended = f"ended early ({process.end})"
    if device.missing_bytes and device.is_library_refused is not False:
        return f"{ended} after an allocation was refused: {missing}"
    return f"{ended}; it fitted until then, but the rest of the program did not run"


def _how_it_went_on(device: DeviceUse) -> str:
    """Return who was refused memory, and what that means, if no error was raised."""
    parts = []
    if device.cache_releases:
        times = "once" if device.cache_releases == 1 else f"{device.cache_releases:,} times"
        parts.append(
            f"the allocator had to release its cache {times}, which is slow: the card has no more "
            "room for it"
        )
    if device.is_library_refused:
        parts.append("a library was refused memory, and went on with less, such as a workspace")
    elif device.is_library_refused is None:
        parts.append(
            "memory was refused: either the allocator then released free blocks, or a library went "
            "on with less, such as a workspace"
        )
    return "; ".join(parts)


def _fits(process: ProcessUse, device: DeviceUse) -> bool | None:
    return not device.ran_out if device.ran_out or process.end is None else None


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"


def _row(process: ProcessUse, device: DeviceUse) -> dict[str, Any]:
    least, most = cards.outside_reserve_of(process.card, with_nccl=process.rank is not None)
    return {
        "emulated": True,
        "process": process.process,
        "program": process.program,
        "rank": process.rank,
        "device": f"cuda:{device.index}",
        "card": process.card.name,
        "total_bytes": process.total_bytes,
        "usable_bytes": process.usable_bytes,
        "max_allocated_bytes": device.allocated_bytes,
        "max_reserved_bytes": device.reserved_bytes,
        "outside_reserve_bytes": [least, most],
        "late_reserved_bytes": device.late_reserved_bytes,
        "missing_bytes": device.missing_bytes,
        "cache_releases": device.cache_releases,
        "out_of_memory": device.ran_out,
        "ended": process.ended,
        "end": process.end,
        "fits": _fits(process, device),
    }


PREFIX = "emulated_cuda: "
_UNITS = {"MB": 2**20, "MIB": 2**20, "GB": 2**30, "GIB": 2**30}
_IGNORING_THE_ENVIRONMENT = r"-[A-Za-z]*[IES]"


def main(arguments: Sequence[str]) -> int:
    """Run a program on emulated devices and return its exit status.

    Args:
        arguments: as ``sys.argv[1:]``.
    """
    reader = parser()
    options = reader.parse_args(arguments)
    if not options.program:
        reader.error("no program to run; write a script, or -m and the name of a module")
    try:
        card = card_of(options.card)
        total_bytes = _bytes(options.memory) if options.memory else card.total_bytes
        library.check_wanted(card, options.devices, total_bytes)
        library.check_kernels(card, library.check_available())
        command = _command(options.program, options.module)
    except DeviceError as error:
        reader.error(str(error))
    _warn_of_untried_torch()
    late = _late_run(options, command, card.name, total_bytes) if options.reserve_range else ()
    with records.folder_of_records() as folder:
        environment = loading.environment_with(
            _with_driver(folder),
            card=options.card,
            devices=options.devices,
            total_bytes=total_bytes,
            values=options.values,
            late_events=options.late_events,
            records=str(folder),
            **_snapshot_setting(options.snapshot),
        )
        process, status = _run(command, environment)
        processes = records.read(folder, {process: status})
    if options.reserve_range:
        processes = records.with_late_reserves(processes, late)
    for line in (*lines(processes), *what_to_do(arguments, options, processes)):
        print(f"{PREFIX}{line}", file=sys.stderr)
    if options.json is not None:
        write_json(options.json, processes)
    return this_process.end_like(status)


def _late_run(
    options: argparse.Namespace, command: Sequence[str], card: str, total_bytes: int
) -> list[ProcessUse]:
    """Run the program with late events; its output is not shown, and its status does not count."""
    with records.folder_of_records() as folder:
        environment = loading.environment_with(
            _with_driver(folder),
            card=card,
            devices=options.devices,
            total_bytes=total_bytes,
            values=options.values,
            late_events=True,
            records=str(folder),
        )
        with suppress(KeyboardInterrupt):
            subprocess.run(
                command,
                env=environment,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return records.read(folder)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m emulated_cuda",
        usage="%(prog)s [options] (script.py | -m module) [arguments of the program ...]",
        description="Run a Python program, and the processes that it starts, on CUDA cards that "
        "this machine does not have. At the end, each process that used a card is listed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--card",
        choices=CARDS,
        default=DEFAULT_CARD,
        help="the card to emulate (default: %(default)s)",
    )
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="how many cards to emulate (default: 1)"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory of each card, such as 40GB (default: that of the real card)",
    )
    parser.add_argument(
        "--no-values",
        dest="values",
        action="store_false",
        help="do not compute the values of tensors; the program runs faster, and takes the same "
        "memory unless a size depends on a value",
    )
    parser.add_argument(
        "--late-events",
        action="store_true",
        help="imitate a card that is far behind the host: an event is done only when the host has "
        "to wait for it, so blocks that several streams used are freed as late as possible",
    )
    parser.add_argument(
        "--reserve-range",
        action="store_true",
        help="run the program twice, first with --late-events and without showing its output, and "
        "print the lowest and the highest reserved memory",
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write each process's memory to this JSON file"
    )
    parser.add_argument(
        "--snapshot",
        type=Path,
        metavar="FILE",
        help="write torch's recording of all allocations to this file, which python -m "
        "pytest_cka_memory snapshot and replay can read; each process that the program starts "
        "writes its own file",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _snapshot_setting(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    path.unlink(missing_ok=True)  # the program, which is the first process, makes it again
    return {SNAPSHOT_SETTING: str(path.absolute())}


def _bytes(text: str) -> int:
    """Return a size such as ``40GB`` or ``512 MB`` in bytes; a GB is 2**30 bytes.

    Raises:
        DeviceError: if it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise DeviceError(f"--memory: {text!r} is not a size; write, for example, 40GB or 512MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _command(program: Sequence[str], is_module: bool) -> list[str]:
    """Return the command that runs the program as Python itself would, with Python's options.

    Raises:
        DeviceError: if the script does not exist, or an option hides the device from the program.
    """
    options = sys.orig_argv[1 : sys.orig_argv.index("-m")] if "-m" in sys.orig_argv else []
    for option in options:
        if re.match(_IGNORING_THE_ENVIRONMENT, option):
            raise DeviceError(
                f"python {option} would hide the emulated device from the program: with -I or -E, "
                "Python ignores the environment variables that load the device; with -S, it does "
                f"not import sitecustomize, which loads it. Leave out {option}"
            )
    if not is_module and not os.path.exists(program[0]):
        raise DeviceError(
            f"there is no file {program[0]!r}; to run a module write -m before its name, and to "
            "run torchrun write -m torch.distributed.run"
        )
    return [sys.executable, *options, *(["-m"] if is_module else []), *program]


def _warn_of_untried_torch() -> None:
    try:
        warning = torch_versions.warning_about(version("torch"))
    except PackageNotFoundError:  # importable without metadata
        return
    if warning:
        print(f"{PREFIX}warning: {warning}", file=sys.stderr)


def _with_driver(folder: Path) -> dict[str, str]:
    """Return this environment with a place in `folder` where Triton finds the driver.

    Otherwise each process would use a folder of the user that stays.
    """
    environment = dict(os.environ)
    if TRITON_DRIVER not in environment:
        link_driver(folder, library.path_of_compiled(library.LIBRARY))
        environment[TRITON_DRIVER] = str(folder)
    return environment


def _run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, int]:
    """Return the number of the finished program and its status.

    The status is minus the signal's number if one ended it.
    """
    with subprocess.Popen(
        command, env=environment, preexec_fn=this_process.ending_with_this_process()
    ) as process:
        # The terminal sends Ctrl-C to both processes, and the program decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for sent in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(sent) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(sent, lambda number, _frame: process.send_signal(number))
        return process.pid, process.wait()
