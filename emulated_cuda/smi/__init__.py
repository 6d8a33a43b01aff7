"""``nvidia-smi`` of emulated devices: what NVML answers, asked by ctypes as any program would.

The fields that queries name are here, too; ``__main__.py`` makes text of them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from emulated_cuda import loading
from emulated_cuda.cards import card_of
from emulated_cuda.errors import DeviceError
from emulated_cuda.loading.library import NVML, Library, path_of_compiled

_NOT_SUPPORTED = 3
_TEXT_BYTES = 4096
_MOST_PROCESSES = 4096


class _Process(ctypes.Structure):
    """``Process2`` in csrc/nvml/memory.cpp."""

    _fields_ = (
        ("process", ctypes.c_uint),
        ("bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Process:
    """A process that uses a device."""

    number: int
    name: str
    used_bytes: int


@dataclass(frozen=True)
class Memory:
    """Memory of a device in bytes."""

    total: int
    free: int
    used: int


class Nvml:
    """NVML for the devices that an environment names.

    Raises:
        DeviceError: if it names none.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        arguments = loading.arguments_of(environment)
        if not arguments:
            raise DeviceError(
                f"no emulated device was found, because {loading.VARIABLE} is not in the "
                "environment; start nvidia-smi from a program that runs under python -m "
                "emulated_cuda or has called emulated_cuda.load()"
            )
        library = Library(
            card_of(arguments["card"]), arguments["devices"], arguments["total_bytes"]
        )
        library.join(loading.setting_of(environment)["machine"])
        self._functions = ctypes.CDLL(path_of_compiled(NVML))
        self._functions.nvmlInit_v2()
        self.devices = [Device(self, index) for index in range(self._count())]

    def text(self, function: str, *arguments: Any) -> str | None:
        """Return the text that a function writes; None if it is not supported."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        is_known = self.call(function, *arguments, text, ctypes.c_uint(len(text)))
        return text.value.decode(errors="replace") if is_known else None

    def call(self, function: str, *arguments: Any) -> bool:
        """Call a function and return whether it is supported.

        Raises:
            DeviceError: if it fails in another way.
        """
        error = getattr(self._functions, function)(*arguments)
        if error not in (0, _NOT_SUPPORTED):
            raise DeviceError(f"{function} of the emulated NVML failed with error {error}")
        return bool(error == 0)

    def cuda_version(self) -> str:
        """Return the version of CUDA that the driver supports: 13.0."""
        version = ctypes.c_int()
        self.call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    def _count(self) -> int:
        count = ctypes.c_uint()
        self.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return count.value


class Device:
    """One device."""

    def __init__(self, nvml: Nvml, index: int) -> None:
        self.nvml, self.index = nvml, index
        self._handle = ctypes.c_void_p()
        nvml.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(self._handle))

    def text(self, question: str) -> str | None:
        """Return the text that ``nvmlDeviceGet`` + `question` writes; None if not supported."""
        return self.nvml.text(f"nvmlDeviceGet{question}", self._handle)

    def number(self, question: str, *arguments: int) -> int | None:
        """Return the number that ``nvmlDeviceGet`` + `question` answers; None if not supported."""
        numbers = self.numbers(question, *arguments)
        return None if numbers is None else numbers[0]

    def numbers(self, question: str, *arguments: int, count: int = 1) -> list[int] | None:
        """Return several numbers that a function answers, each by a pointer of its own."""
        answers = [ctypes.c_ulonglong() for _ in range(count)]
        pointers = [ctypes.byref(number) for number in answers]
        call_arguments = [ctypes.c_uint(argument) for argument in arguments]
        if not self.nvml.call(f"nvmlDeviceGet{question}", self._handle, *call_arguments, *pointers):
            return None
        return [number.value for number in answers]

    def bus_id(self) -> str:
        """Return its address on the PCI bus."""
        return f"00000000:{self.index + 1:02X}:00.0"

    def pci_device(self) -> int:
        """Return the numbers of the kind of device and of the vendor as one."""
        info = (ctypes.c_uint * 17)()  # `PciInfo` in csrc/nvml/facts.cpp
        self.nvml.call("nvmlDeviceGetPciInfo_v3", self._handle, info)
        return int(info[7])

    def memory(self) -> Memory:
        """Return its memory."""
        info = (ctypes.c_ulonglong * 3)()
        self.nvml.call("nvmlDeviceGetMemoryInfo", self._handle, info)
        return Memory(*info)

    def processes(self) -> list[Process]:
        """Return the processes that use it."""
        count = ctypes.c_uint(_MOST_PROCESSES)
        processes = (_Process * _MOST_PROCESSES)()
        question = "nvmlDeviceGetComputeRunningProcesses_v3"
        self.nvml.call(question, self._handle, ctypes.byref(count), processes)
        return [
            Process(each.process, self._name_of(each.process), each.bytes)
            for each in processes[: count.value]
        ]

    def _name_of(self, process: int) -> str:
        try:
            return self.nvml.text("nvmlSystemGetProcessName", ctypes.c_uint(process)) or "[N/A]"
        except DeviceError:  # the process has ended meanwhile
            return "[Not Found]"


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
