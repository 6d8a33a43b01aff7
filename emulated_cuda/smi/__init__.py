"""``nvidia-smi`` of emulated devices: what NVML answers, asked by ctypes as any program would.

:mod:`.output` makes text of the answers.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from emulated_cuda import loading
from emulated_cuda.cards import card_of
from emulated_cuda.errors import DeviceError
from emulated_cuda.loading import checks
from emulated_cuda.loading.library import Library

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
        self._functions = ctypes.CDLL(checks.path_of_compiled(checks.NVML))
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
