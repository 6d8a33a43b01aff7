"""What ``nvidia-smi`` prints without a query: the table, and with ``-q`` the long form."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from emulated_cuda.smi.fields import FIELDS, mib
from emulated_cuda.smi.nvml import Device, Nvml

_INNER = 89
_WIDTHS = (41, 24, 22)
NOTE = (
    "Emulated by emulated_cuda: there is no GPU. Memory and processes are counted; "
    "utilization, temperature and power are fixed values"
)
OVERFULL = "Each process has a whole card for itself: together they use more than it has"


def lines(nvml: Nvml, devices: Sequence[Device]) -> Iterator[str]:
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
