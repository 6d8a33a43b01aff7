"""``python -m emulated_cuda.smi``: what ``nvidia-smi`` of an emulated device runs.

It has the options of ``nvidia-smi``, as far as an emulated device has something to show.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from emulated_cuda.errors import DeviceError
from emulated_cuda.smi import Device, Nvml, output
from emulated_cuda.smi.output import FIELDS, NOT_KNOWN, PROCESS_FIELDS, Field, ProcessField

_NO_DRIVER, _NO_DEVICE = 9, 6  # the statuses of nvidia-smi
_FORMATS = ("csv", "noheader", "nounits")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(
            2,
            f"nvidia-smi (emulated): {message}; run nvidia-smi --help to see what is supported\\n",
        )


def main(arguments: Sequence[str]) -> int:
    """Print what the options ask for, and return the exit status.

    Args:
        arguments: as ``sys.argv[1:]``.
    """
    reader = _parser()
    options = reader.parse_args(arguments)
    _check(reader, options)
    if options.help_fields:
        print("\n".join(options.help_fields))
        return 0
    try:
        nvml = Nvml()
    except DeviceError as error:
        print(f"nvidia-smi (emulated): {error}", file=sys.stderr)
        return _NO_DRIVER
    devices = [device for device in nvml.devices if _is_wanted(device, options.id)]
    if not devices:
        print("No devices were found")
        return _NO_DEVICE
    pause = _pause(options)
    if sys.stderr.isatty() and (options.list or options.format):
        # Lists and queries are often parsed by programs, so their text stays as it is on a card.
        # A person at a terminal gets the note that the card is emulated on stderr.
        print(f"nvidia-smi: {output.NOTE}", file=sys.stderr)
    while True:
        for line in _lines(options, nvml, devices):
            print(line, flush=pause is not None)
        if pause is None:
            return 0
        time.sleep(pause)
        if "noheader" not in (options.format or ()):
            options.format = options.format and [*options.format, "noheader"]


def _lines(options: argparse.Namespace, nvml: Nvml, devices: Sequence[Device]) -> Iterator[str]:
    if options.list:
        for device in devices:
            yield f"GPU {device.index}: {device.text('Name')} (UUID: {device.text('UUID')})"
    elif options.query_gpu:
        fields = [FIELDS[name] for name in options.query_gpu]
        yield from _header(options.query_gpu, fields, options.format)
        for device in devices:
            yield _csv(fields, [field.value(device) for field in fields], options.format)
    elif options.query_compute_apps:
        columns = [PROCESS_FIELDS[name] for name in options.query_compute_apps]
        yield from _header(options.query_compute_apps, columns, options.format)
        for device in devices:
            for process in device.processes():
                values = [column.value(device, process) for column in columns]
                yield _csv(columns, values, options.format)
    elif options.query:
        yield from output.long_form(nvml, devices, options.display)
    else:
        yield from output.lines(nvml, devices)


def _header(
    names: Sequence[str], fields: Sequence[Field | ProcessField], form: Sequence[str]
) -> Iterator[str]:
    if "noheader" not in form:
        units = [f" [{field.unit}]" if field.unit else "" for field in fields]
        yield ", ".join(name + unit for name, unit in zip(names, units, strict=True))


def _csv(
    fields: Sequence[Field | ProcessField], values: Sequence[object], form: Sequence[str]
) -> str:
    has_units = "nounits" not in form
    cells = []
    for field, value in zip(fields, values, strict=True):
        unit = f" {field.unit}" if field.unit and has_units else ""
        cells.append(NOT_KNOWN if value is None else f"{value}{unit}")
    return ", ".join(cells)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="nvidia-smi", allow_abbrev=False, description=output.NOTE)
    add = parser.add_argument
    add("-L", "--list-gpus", dest="list", action="store_true", help="list the devices")
    add("-q", "--query", action="store_true", help="show all that is known of each device")
    add(
        "-d",
        "--display",
        type=_words,
        default=[],
        metavar="SECTIONS",
        help="with -q, show only these sections, separated by commas; there are MEMORY and PIDS",
    )
    add(
        "-i",
        "--id",
        type=_words,
        metavar="IDS",
        help="show only these devices, by index, UUID or PCI bus",
    )
    add("--query-gpu", type=_words, metavar="FIELDS", help="print these fields of each device")
    add(
        "--query-compute-apps",
        type=_words,
        metavar="FIELDS",
        help="print these fields of each process",
    )
    add("--format", type=_words, metavar="csv[,noheader][,nounits]", help="format of the fields")
    add(
        "-l",
        "--loop",
        type=float,
        nargs="?",
        const=5.0,
        metavar="SECONDS",
        help="repeat after this time",
    )
    add("-lms", "--loop-ms", type=float, metavar="MILLISECONDS", help="repeat after this time")
    for option, fields in (("gpu", FIELDS), ("compute-apps", PROCESS_FIELDS)):
        add(
            f"--help-query-{option}",
            dest="help_fields",
            action="store_const",
            const=list(fields),
            help="list the fields that are known",
        )
    return parser


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _check(reader: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    known: Mapping[str, object]
    for requested, known in (
        (options.query_gpu, FIELDS),
        (options.query_compute_apps, PROCESS_FIELDS),
    ):
        for name in requested or ():
            if name not in known:
                option = "compute-apps" if known is PROCESS_FIELDS else "gpu"
                reader.error(
                    f'field "{name}" is not a valid field to query on an emulated device; run '
                    f"nvidia-smi --help-query-{option} to see the valid ones"
                )
    for name in options.display:
        if name not in (*output.SECTIONS, "PIDS"):
            reader.error(
                f"-d {name} is not a section; write one or more of "
                f"{', '.join((*output.SECTIONS, 'PIDS'))}"
            )
    form = options.format or []
    if (options.query_gpu or options.query_compute_apps) and "csv" not in form:
        reader.error("a query needs a format; add --format=csv")
    for word in form:
        if word not in _FORMATS:
            reader.error(
                f"--format: {word!r} is unknown; write one or more of {', '.join(_FORMATS)}"
            )


def _pause(options: argparse.Namespace) -> float | None:
    if options.loop_ms is not None:
        return float(options.loop_ms) / 1000
    return None if options.loop is None else float(options.loop)


def _is_wanted(device: Device, ids: Sequence[str] | None) -> bool:
    if ids is None:
        return True
    bus_id = device.bus_id()
    names = {str(device.index), device.text("UUID"), bus_id.lower(), bus_id[4:].lower()}
    return any(word in names or word.lower() in names for word in ids)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:  # how a loop ends
        status = 130
    except BrokenPipeError:  # "nvidia-smi | head"; Python would report it once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
