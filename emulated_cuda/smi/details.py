"""The long form, ``nvidia-smi -q``, with what NVML of an emulated device answers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from emulated_cuda.smi.fields import FIELDS, mib
from emulated_cuda.smi.nvml import Device, Nvml
from emulated_cuda.smi.table import NOTE

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


def lines(nvml: Nvml, devices: Sequence[Device], only: Collection[str] = ()) -> Iterator[str]:
    """Yield the lines; of each device only some sections, if any are named."""
    yield ""
    yield "==============NVSMI LOG=============="
    yield NOTE
    yield ""
    yield _line(0, "Timestamp", time.strftime("%a %b %d %H:%M:%S %Y"))
    yield _line(0, "Driver Version", nvml.text("nvmlSystemGetDriverVersion"))
    yield _line(0, "CUDA Version", nvml.cuda_version())
    yield ""
    yield _line(0, "Attached GPUs", len(nvml.devices))
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
        yield "    Processes" if processes else _line(1, "Processes", "None")
        for process in processes:
            yield _line(2, "Process ID", process.number)
            yield _line(3, "Type", "C")
            yield _line(3, "Name", process.name)
            yield _line(3, "Used GPU Memory", f"{mib(process.used_bytes)} MiB")


def _field(depth: int, label: str, name: str, device: Device) -> str:
    field = FIELDS[name]
    value = field.value(device)
    if value is not None and name == "temperature.gpu":
        value = f"{value} C"
    return _line(
        depth, label, value if value is None or not field.unit else f"{value} {field.unit}"
    )


def _line(depth: int, label: str, value: object) -> str:
    return f"{'    ' * depth + label:<50}: {'N/A' if value is None else value}"
