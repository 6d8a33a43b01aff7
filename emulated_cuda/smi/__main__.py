"""``python -m emulated_cuda.smi``: what ``nvidia-smi`` of an emulated device runs and prints.

It has the options of ``nvidia-smi``, as far as an emulated device has something to show: fields of
queries, the table, and with ``-q`` the long form.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NoReturn

from emulated_cuda.errors import DeviceError
from emulated_cuda.smi import (
    FIELDS,
    NOT_KNOWN,
    PROCESS_FIELDS,
    Device,
    Field,
    Nvml,
    ProcessField,
    mib,
)

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
        print(f"nvidia-smi: {NOTE}", file=sys.stderr)
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
        yield from long_form(nvml, devices, options.display)
    else:
        yield from table_lines(nvml, devices)


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
    parser = _Parser(prog="nvidia-smi", allow_abbrev=False, description=NOTE)
    add = parser.add_argument
    add("-L", "--list-gpus", dest="list", action="store_true", help="list the devices")
    add("-q", "--query", action="store_true", help="show all that is known of each device")
    add(
        "-d",
        "--display",
        type=_words,
        default=[],
        metavar="SECTIONS",
        help="with -q, show only these sections, separated by commas; available: MEMORY, PIDS",
    )
    add(
        "-i",
        "--id",
        type=_words,
        metavar="IDS",
        help="show only these devices, by index, UUID or PCI bus ID",
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
        if name not in (*SECTIONS, "PIDS"):
            reader.error(
                f"-d: {name} is not a section; write one or more of "
                f"{', '.join((*SECTIONS, 'PIDS'))}"
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


_INNER = 89
_WIDTHS = (41, 24, 22)
NOTE = (
    "Emulated by emulated_cuda, without a GPU. The memory is that of the processes listed, which "
    "use the emulated card; utilization, temperature and power are fixed values"
)
OVERFULL = (
    "The processes together use more memory than the card has, because the emulated device gives "
    "each process a whole card"
)


def table_lines(nvml: Nvml, devices: Sequence[Device]) -> Iterator[str]:
    """Yield the lines of the table."""
    rule = "+" + "+".join("-" * width for width in _WIDTHS) + "+"
    driver = nvml.text("nvmlSystemGetDriverVersion")
    yield time.strftime("%a %b %d %H:%M:%S %Y")
    yield _rule()
    yield _line(
        f" NVIDIA-SMI {driver} (emulated)      Driver Version: {driver}       "
        f"CUDA Version: {nvml.cuda_version()}"
    )
    yield "|" + rule[1:]
    yield _row(
        " GPU  Name                 Persistence-M",
        " Bus-Id          Disp.A",
        " Volatile Uncorr. ECC",
    )
    yield _row(
        " Fan  Temp   Perf          Pwr:Usage/Cap",
        "           Memory-Usage",
        " GPU-Util  Compute M.",
    )
    yield _row("", "", "               MIG M.")
    yield "|" + "+".join("=" * width for width in _WIDTHS) + "|"
    for device in devices:
        yield from _device_rows(device)
        yield rule
    yield ""
    yield from _process_lines(devices)
    yield NOTE
    if any(_is_overfull(device) for device in devices):
        yield OVERFULL


def _device_rows(device: Device) -> Iterator[str]:
    memory = device.memory()
    questions = "PowerUsage", "EnforcedPowerLimit"
    watts = [(device.number(question) or 0) // 1000 for question in questions]
    has_ecc = device.number("DefaultEccMode") is not None
    can_be_divided = device.numbers("MigMode", count=2) is not None
    name = device.text("Name") or ""
    yield _row(
        f" {device.index:3}  {name[:30]:30} {'Off':>3}",
        f"   {device.bus_id()} Off",
        f" {'0' if has_ecc else 'N/A':>20}",
    )
    power = f"{watts[0]}W / {watts[1]:4}W"
    yield _row(
        f" N/A  {device.number('Temperature', 0):3}C    P0    {power:>20}",
        f" {mib(memory.used):7}MiB / {mib(memory.total):6}MiB",
        f" {0:6}%      Default",
    )
    yield _row("", "", f" {'Disabled' if can_be_divided else 'N/A':>20}")


def _process_lines(devices: Sequence[Device]) -> Iterator[str]:
    rows = [
        f"  {device.index:3}   N/A  N/A {process.number:>16}      C   {process.name[-34:]:34}"
        f" {mib(process.used_bytes):>7}MiB"
        for device in devices
        for process in device.processes()
    ]
    yield _rule()
    yield _line(" Processes:")
    columns = "PID   Type   Process name                        GPU Memory"
    yield _line(f"  GPU   GI   CI              {columns}")
    yield _line(f"        ID   ID{'Usage':>68}")
    yield "|" + "=" * _INNER + "|"
    yield from map(_line, rows or ["  No running processes found"])
    yield _rule()


def _is_overfull(device: Device) -> bool:
    return sum(process.used_bytes for process in device.processes()) > device.memory().total


def _rule() -> str:
    return "+" + "-" * _INNER + "+"


def _line(text: str) -> str:
    return f"|{text:{_INNER}}|"


def _row(*cells: str) -> str:
    texts = [f"{cell:{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)]
    return f"|{'|'.join(texts)}|"


SECTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "MEMORY": (
        "FB Memory Usage",
        {
            "Total": "memory.total",
            "Reserved": "memory.reserved",
            "Used": "memory.used",
            "Free": "memory.free",
        },
    ),
    "UTILIZATION": ("Utilization", {"GPU": "utilization.gpu", "Memory": "utilization.memory"}),
    "ECC": ("ECC Mode", {"Current": "ecc.mode.current", "Pending": "ecc.mode.pending"}),
    "TEMPERATURE": ("Temperature", {"GPU Current Temp": "temperature.gpu"}),
    "POWER": (
        "GPU Power Readings",
        {
            "Average Power Draw": "power.draw.average",
            "Current Power Limit": "power.limit",
            "Default Power Limit": "power.default_limit",
            "Min Power Limit": "power.min_limit",
            "Max Power Limit": "power.max_limit",
        },
    ),
    "CLOCK": (
        "Clocks",
        {
            "Graphics": "clocks.current.graphics",
            "SM": "clocks.current.sm",
            "Memory": "clocks.current.memory",
        },
    ),
    "COMPUTE": ("Compute", {"Compute Mode": "compute_mode", "Compute Capability": "compute_cap"}),
}
"""What ``-d`` takes, beside PIDS: the title of a section, and its fields."""

_GENERAL = {
    "Product Name": "name",
    "Persistence Mode": "persistence_mode",
    "MIG Mode": "mig.mode.current",
    "Serial Number": "serial",
    "GPU UUID": "uuid",
    "VBIOS Version": "vbios_version",
    "Bus Id": "pci.bus_id",
    "Device Id": "pci.device_id",
    "Fan Speed": "fan.speed",
    "Performance State": "pstate",
}


def long_form(nvml: Nvml, devices: Sequence[Device], only: Collection[str] = ()) -> Iterator[str]:
    """Yield the lines; of each device only some sections, if any are named."""
    yield ""
    yield "==============NVSMI LOG=============="
    yield NOTE
    yield ""
    yield _line_of_section(0, "Timestamp", time.strftime("%a %b %d %H:%M:%S %Y"))
    yield _line_of_section(0, "Driver Version", nvml.text("nvmlSystemGetDriverVersion"))
    yield _line_of_section(0, "CUDA Version", nvml.cuda_version())
    yield ""
    yield _line_of_section(0, "Attached GPUs", len(nvml.devices))
    for device in devices:
        yield f"GPU {device.bus_id()}"
        yield from _device_lines(device, only)
        yield ""


def _device_lines(device: Device, only: Collection[str]) -> Iterator[str]:
    if not only:
        yield from (_field(1, label, name, device) for label, name in _GENERAL.items())
    for name, (title, fields) in SECTIONS.items():
        if not only or name in only:
            yield f"    {title}"
            yield from (_field(2, label, field, device) for label, field in fields.items())
    if not only or "PIDS" in only:
        processes = device.processes()
        yield "    Processes" if processes else _line_of_section(1, "Processes", "None")
        for process in processes:
            yield _line_of_section(2, "Process ID", process.number)
            yield _line_of_section(3, "Type", "C")
            yield _line_of_section(3, "Name", process.name)
            yield _line_of_section(3, "Used GPU Memory", f"{mib(process.used_bytes)} MiB")


def _field(depth: int, label: str, name: str, device: Device) -> str:
    field = FIELDS[name]
    value = field.value(device)
    if value is not None and name == "temperature.gpu":
        value = f"{value} C"
    return _line_of_section(
        depth, label, value if value is None or not field.unit else f"{value} {field.unit}"
    )


def _line_of_section(depth: int, label: str, value: object) -> str:
    return f"{'    ' * depth + label:<50}: {'N/A' if value is None else value}"


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
