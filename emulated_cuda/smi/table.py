"""The table that ``nvidia-smi`` prints without options."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from emulated_cuda.smi.fields import mib
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
