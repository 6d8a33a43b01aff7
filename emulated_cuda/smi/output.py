"""What ``nvidia-smi`` prints: fields of queries, the table, and with ``-q`` the long form."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from emulated_cuda.smi import Device, Nvml, Process

_GRAPHICS, _MULTIPROCESSORS, _MEMORY, _VIDEO = range(4)
NOT_KNOWN = "[N/A]"


@dataclass(frozen=True)
class Field:
    """One column."""

    value: Callable[[Device], object]
    """Its value; None if the device does not have it."""
    unit: str = ""


@dataclass(frozen=True)
class ProcessField:
    """One column of a list of processes."""

    value: Callable[[Device, Process], object]
    unit: str = ""


def mib(size: int) -> int:
    """Return bytes as whole MiB."""
    return size // 2**20


def watts(milliwatts: int | None) -> str | None:
    """Return mW as W with two decimals."""
    return None if milliwatts is None else f"{milliwatts / 1000:.2f}"


def switch(number: int | None) -> str | None:
    """Return a mode as a word."""
    return None if number is None else ("Disabled", "Enabled")[number]


def _now() -> str:
    return f"{datetime.now():%Y/%m/%d %H:%M:%S.%f}"[:-3]


def _number(question: str, *arguments: int, unit: str = "") -> Field:
    return Field(lambda device: device.number(question, *arguments), unit)


def _mode(question: str, position: int = 0, count: int = 1) -> Field:
    def value(device: Device) -> str | None:
        numbers = device.numbers(question, count=count)
        return None if numbers is None else switch(numbers[position])

    return Field(value)


def _power(question: str) -> Field:
    return Field(lambda device: watts(device.number(question)), "W")


def _limit(position: int) -> Field:
    def value(device: Device) -> str | None:
        limits = device.numbers("PowerManagementLimitConstraints", count=2)
        return watts(limits[position]) if limits else None

    return Field(value, "W")


def _memory(name: str) -> Field:
    return Field(lambda device: mib(getattr(device.memory(), name)), "MiB")


def _clock(kind: int, question: str = "ClockInfo") -> Field:
    return _number(question, kind, unit="MHz")


def _utilization(position: int) -> Field:
    def value(device: Device) -> int:
        # Two numbers of 32 bits in one structure: the first is in the low half.
        both = device.number("UtilizationRates") or 0
        return both >> 32 * position & 0xFFFFFFFF

    return Field(value, "%")


def _capability(device: Device) -> str:
    major, minor = device.numbers("CudaComputeCapability", count=2) or (0, 0)
    return f"{major}.{minor}"


def _unknown(unit: str = "") -> Field:
    return Field(lambda _device: None, unit)


_NAME = Field(lambda device: device.text("Name"))
_UUID = Field(lambda device: device.text("UUID"))
_BUS_ID = Field(Device.bus_id)

FIELDS: Mapping[str, Field] = {
    "timestamp": Field(lambda _device: _now()),
    "driver_version": Field(lambda device: device.nvml.text("nvmlSystemGetDriverVersion")),
    "count": Field(lambda device: len(device.nvml.devices)),
    **dict.fromkeys(("name", "gpu_name"), _NAME),
    **dict.fromkeys(("serial", "gpu_serial"), Field(lambda device: device.text("Serial"))),
    **dict.fromkeys(("uuid", "gpu_uuid"), _UUID),
    "index": Field(lambda device: device.index),
    "compute_cap": Field(_capability),
    **dict.fromkeys(("pci.bus_id", "gpu_bus_id"), _BUS_ID),
    "pci.domain": Field(lambda _device: "0x0000"),
    "pci.bus": Field(lambda device: f"0x{device.index + 1:02X}"),
    "pci.device": Field(lambda _device: "0x00"),
    "pci.device_id": Field(lambda device: f"0x{device.pci_device():08X}"),
    "pci.sub_device_id": _unknown(),
    "pcie.link.gen.current": _number("CurrPcieLinkGeneration"),
    "pcie.link.gen.max": _number("MaxPcieLinkGeneration"),
    "pcie.link.width.current": _number("CurrPcieLinkWidth"),
    "pcie.link.width.max": _number("MaxPcieLinkWidth"),
    "vbios_version": Field(lambda device: device.text("VbiosVersion")),
    "display_active": _mode("DisplayActive"),
    "display_mode": _mode("DisplayMode"),
    "persistence_mode": _mode("PersistenceMode"),
    "accounting.mode": _mode("AccountingMode"),
    "compute_mode": Field(lambda _device: "Default"),
    "mig.mode.current": _mode("MigMode", 0, 2),
    "mig.mode.pending": _mode("MigMode", 1, 2),
    "ecc.mode.current": _mode("EccMode", 0, 2),
    "ecc.mode.pending": _mode("EccMode", 1, 2),
    "pstate": Field(lambda device: f"P{device.number('PerformanceState')}"),
    "fan.speed": _number("FanSpeed", unit="%"),
    "memory.total": _memory("total"),
    "memory.reserved": Field(lambda _device: 0, "MiB"),
    "memory.used": _memory("used"),
    "memory.free": _memory("free"),
    "utilization.gpu": _utilization(0),
    "utilization.memory": _utilization(1),
    "temperature.gpu": _number("Temperature", 0),
    "temperature.memory": _unknown(),
    "power.management": _mode("PowerManagementMode"),
    "power.draw": _power("PowerUsage"),
    "power.draw.average": _power("PowerUsage"),
    "power.draw.instant": _power("PowerUsage"),
    "power.limit": _power("PowerManagementLimit"),
    "enforced.power.limit": _power("EnforcedPowerLimit"),
    "power.default_limit": _power("PowerManagementDefaultLimit"),
    "power.min_limit": _limit(0),
    "power.max_limit": _limit(1),
    **{
        f"clocks.{word}{name}": _clock(kind, question)
        for word, question in (
            ("current.", "ClockInfo"),
            ("max.", "MaxClockInfo"),
            ("applications.", "ApplicationsClock"),
            ("default_applications.", "DefaultApplicationsClock"),
        )
        for name, kind in (
            ("graphics", _GRAPHICS),
            ("sm", _MULTIPROCESSORS),
            ("memory", _MEMORY),
            ("video", _VIDEO),
        )
    },
    **dict.fromkeys(("clocks.gr", "clocks.max.gr", "clocks.applications.gr"), _clock(_GRAPHICS)),
    "clocks.sm": _clock(_MULTIPROCESSORS),
    **dict.fromkeys(("clocks.mem", "clocks.max.mem", "clocks.applications.mem"), _clock(_MEMORY)),
    "clocks.video": _clock(_VIDEO),
    **dict.fromkeys(
        ("clocks_throttle_reasons.active", "clocks_event_reasons.active"),
        Field(lambda device: f"0x{device.number('CurrentClocksEventReasons') or 0:016x}"),
    ),
}
"""The fields of a device by the names that ``--query-gpu`` takes."""

PROCESS_FIELDS: Mapping[str, ProcessField] = {
    "timestamp": ProcessField(lambda _device, _process: _now()),
    "gpu_name": ProcessField(lambda device, _process: device.text("Name")),
    "gpu_bus_id": ProcessField(lambda device, _process: device.bus_id()),
    "gpu_serial": ProcessField(lambda device, _process: device.text("Serial")),
    "gpu_uuid": ProcessField(lambda device, _process: device.text("UUID")),
    "pid": ProcessField(lambda _device, process: process.number),
    **dict.fromkeys(("process_name", "name"), ProcessField(lambda _device, process: process.name)),
    **dict.fromkeys(
        ("used_gpu_memory", "used_memory"),
        ProcessField(lambda _device, process: mib(process.used_bytes), "MiB"),
    ),
}
"""The fields of a process by the names that ``--query-compute-apps`` takes."""


_INNER = 89
_WIDTHS = (41, 24, 22)
NOTE = (
    "Emulated by emulated_cuda, without a GPU. Memory and processes are those of the programs; "
    "utilization, temperature and power are fixed values"
)
OVERFULL = (
    "The processes together use more memory than the card has, because each process has a whole "
    "card"
)


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
