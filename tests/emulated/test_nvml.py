"""NVML and nvidia-smi of an emulated device: what programs learn that log a card's state.

Nothing here imports torch in the emulated processes: NVML is found without it. They allocate with
``cudaMalloc``, which is all that torch's allocator does.
"""

import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from emulated_cuda.cards import CARDS
from emulated_cuda.errors import DeviceError
from emulated_cuda.smi import FIELDS, Nvml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MIB = 2**20
CONTEXT = 512
UNINITIALIZED, INVALID, NOT_SUPPORTED, NOT_FOUND, TOO_SMALL, WRONG_VERSION = 1, 2, 3, 6, 7, 25

ASK = """
import ctypes, json, os, signal, subprocess, sys
MIB = 2**20
nvml = ctypes.CDLL("libnvidia-ml.so.1")
said = {"torch": "torch" in sys.modules, "too early": nvml.nvmlDeviceGetCount_v2(None)}
assert nvml.nvmlInitWithFlags(0) == 0
devices = [ctypes.c_void_p(), ctypes.c_void_p()]
for index, device in enumerate(devices):
    assert nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0

def number(function, *arguments, of=ctypes.c_uint, device=devices[0]):
    found = of()
    error = getattr(nvml, function)(device, *arguments, ctypes.byref(found))
    return getattr(found, "value", found) if error == 0 else f"error {error}"

def text(function, *arguments):
    found = ctypes.create_string_buffer(96)
    assert getattr(nvml, function)(*arguments, found, ctypes.c_uint(96)) == 0
    return found.value.decode()

def allocate(size):
    pointer = ctypes.c_void_p()
    assert ctypes.CDLL(None).cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0
    return pointer

def allocate_much():
    ctypes.CDLL(None).cudaSetDevice(1)
    allocate(50 * 2**30)

def used(index):
    memory = (ctypes.c_ulonglong * 3)()
    assert nvml.nvmlDeviceGetMemoryInfo(devices[index], memory) == 0
    assert memory[1] == memory[0] - memory[2]
    return memory[2] // MIB
"""

PROGRAM = """
utilization = (ctypes.c_uint * 2)(7, 7)
said["utilization"] = [nvml.nvmlDeviceGetUtilizationRates(devices[0], utilization), *utilization]
said["temperature"] = number("nvmlDeviceGetTemperature", 0)
said["power"] = number("nvmlDeviceGetPowerUsage")
said["clock"] = number("nvmlDeviceGetClockInfo", 1)
said["memory clock"] = number("nvmlDeviceGetClockInfo", 2)
said["limit"] = number("nvmlDeviceGetEnforcedPowerLimit")
said["name"] = text("nvmlDeviceGetName", devices[0])
said["uuid"] = text("nvmlDeviceGetUUID", devices[1])
said["driver"] = text("nvmlSystemGetDriverVersion")
said["index"] = number("nvmlDeviceGetIndex", device=devices[1])
said["brand"] = number("nvmlDeviceGetBrand")
said["architecture"] = number("nvmlDeviceGetArchitecture")
said["cores"] = number("nvmlDeviceGetNumGpuCores")
said["generation"] = number("nvmlDeviceGetMaxPcieLinkGeneration")
said["reads of a peer"] = number("nvmlDeviceGetP2PStatus", devices[1], 0)
said["NVLink to a peer"] = number("nvmlDeviceGetP2PStatus", devices[1], 2)
major, minor = ctypes.c_int(), ctypes.c_int()
nvml.nvmlDeviceGetCudaComputeCapability(devices[0], ctypes.byref(major), ctypes.byref(minor))
said["capability"] = [major.value, minor.value]

pci = (ctypes.c_uint * 17)()
nvml.nvmlDeviceGetPciInfo_v3(devices[1], pci)
bus_id = bytes(pci)[36:54]
found = ctypes.c_void_p()
nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(found))
said["PCI"] = [bus_id.decode(), hex(pci[7]), found.value == devices[1].value]
words = (ctypes.c_ulong * 16)()
nvml.nvmlDeviceGetCpuAffinity(devices[0], 16, words)
cpus = {cpu for cpu in range(1024) if words[cpu // 64] >> cpu % 64 & 1}
said["CPUs"] = cpus == os.sched_getaffinity(0)

# Errors as NVML has them
said["fan"] = number("nvmlDeviceGetFanSpeed")
said["a setter"] = nvml.nvmlDeviceSetPowerManagementLimit(devices[0], 1)
said["no device"] = number("nvmlDeviceGetPowerUsage", device=ctypes.c_void_p(1))
said["no output"] = nvml.nvmlDeviceGetPowerUsage(devices[0], None)
said["short"] = nvml.nvmlDeviceGetName(devices[0], ctypes.create_string_buffer(4), 4)
said["third"] = nvml.nvmlDeviceGetHandleByIndex_v2(2, ctypes.byref(found))
said["uuid of none"] = nvml.nvmlDeviceGetHandleByUUID(b"GPU-1", ctypes.byref(found))
nvml.nvmlErrorString.restype = ctypes.c_char_p
said["text of 3"] = nvml.nvmlErrorString(3).decode()
second = (ctypes.c_ulonglong * 5)(40 | 1 << 24)
said["version 1"] = nvml.nvmlDeviceGetMemoryInfo_v2(devices[0], second)
second[0] = 40 | 2 << 24
said["version 2"] = [nvml.nvmlDeviceGetMemoryInfo_v2(devices[0], second), second[1] // MIB]
values = (ctypes.c_ulonglong * 10)(186, 0, 0, 0, 0, 82, 0, 0, 0, 0)
assert nvml.nvmlDeviceGetFieldValues(devices[0], 2, values) == 0
said["power as a value"] = [values[3] >> 32, values[4]]
said["memory's temperature as a value"] = values[8] >> 32

# Memory and processes: of this one, of one that is forked, and of a child without torch
def processes(index):
    records, count = (ctypes.c_ulonglong * 30)(), ctypes.c_uint(0)
    list_them = nvml.nvmlDeviceGetComputeRunningProcesses_v3
    error = list_them(devices[index], ctypes.byref(count), None)
    room = ctypes.c_uint(10)
    assert list_them(devices[index], ctypes.byref(room), records) == 0
    assert error == (7 if room.value else 0) and count.value == room.value
    return {records[3 * i] & 0xFFFFFFFF: records[3 * i + 1] // MIB for i in range(room.value)}

def show(*options):
    run = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True)
    return [run.returncode, run.stdout, run.stderr]

said["before"] = [used(0), processes(0)]
pointer = allocate(100 * MIB)
said["allocated"] = [used(0), used(1), processes(0) == {os.getpid(): 612}]
reading, writing = os.pipe()
if os.fork() == 0:
    os.write(writing, str(used(0)).encode())
    os._exit(0)
os.wait()
said["seen by a fork"] = int(os.read(reading, 10))
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1] + "\\nallocate(50 * MIB)\\nprint(used(0), flush=True)\\n"
     "sys.stdin.readline()\\nallocate_much()\\nprint('', flush=True)\\nsys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
said["seen by a child"] = int(child.stdout.readline())
said["with a child"] = [used(0), processes(0) == {os.getpid(): 612, child.pid: 562}]
said["table"] = show()
said["list"] = show("-L")
said["all fields"] = show("--query-gpu=" + sys.argv[2], "--format=csv")
said["numbers"] = show(
    "--query-gpu=index,memory.used,utilization.gpu,utilization.memory,power.draw,fan.speed",
    "--format=csv,noheader,nounits",
)
said["one device"] = show("--query-gpu=index", "--format=csv,noheader", "-i", "00000000:02:00.0")
said["processes"] = show("--query-compute-apps=pid,used_memory,gpu_uuid", "--format=csv")
said["long"] = show("-q", "-d", "MEMORY,PIDS", "-i", "0")
child.stdin.write("\\n")
child.stdin.flush()
child.stdout.readline()
allocate_much()
total = number("nvmlDeviceGetMemoryInfo", of=ctypes.c_ulonglong * 3)[0] // MIB
said["overfull"] = [used(1) == total, len(processes(1)), show()[1].splitlines()[-1]]
child.kill()
child.wait()
said["child killed"] = [used(0), len(processes(0))]
ctypes.CDLL(None).cudaFree(pointer)
said["freed"] = used(0)
said["pids"] = [os.getpid(), child.pid]
said["no such device"] = show("-i", "7")
said["unknown field"] = show("--query-gpu=nonsense", "--format=csv")
said["no format"] = show("--query-gpu=name")
said["unknown option"] = show("topo", "-m")
said["shut down"] = [nvml.nvmlShutdown(), number("nvmlDeviceGetIndex"), nvml.nvmlShutdown()]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(python, tmp_path_factory):
    """Return what one program on two A100 found out, and what nvidia-smi printed in it."""
    script = tmp_path_factory.mktemp("nvml") / "program.py"
    script.write_text(ASK + PROGRAM, encoding="utf-8")
    run = python("-m", "emulated_cuda", "--devices", "2", str(script), ASK, ",".join(FIELDS))
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_nvml_is_found_before_torch_is_imported(said):
    """A program that asks for the library by its name has the device, and does not need torch."""
    assert said["torch"] is False
    assert said["too early"] == UNINITIALIZED


def test_facts_of_the_card_follow_from_its_row(said):
    """Fixed facts are those of the card and of its place among the devices."""
    assert said["name"] == CARDS["a100"].hardware.name
    assert (said["limit"], said["clock"], said["memory clock"]) == (400_000, 1410, 1593)
    assert said["uuid"] == "GPU-00000000-0000-0000-0000-000000000002"
    assert said["PCI"] == ["00000000:02:00.0\0\0", "0x20b210de", True]
    nvidia, ampere = 14, 7
    assert (said["brand"], said["architecture"], said["capability"]) == (nvidia, ampere, [8, 0])
    assert (said["cores"], said["generation"], said["index"]) == (6912, 4, 1)
    assert (said["reads of a peer"], said["NVLink to a peer"]) == (0, 5)
    assert said["CPUs"] is True
    assert re.fullmatch(r"5\d\d\.00\.00", said["driver"])


def test_measurements_are_steady_values(said):
    """What would be measured is a documented number: a program that logs it goes on."""
    assert said["utilization"] == [0, 0, 0]
    assert (said["temperature"], said["power"]) == (30, 40_000)
    assert said["power as a value"] == [0, 40_000]
    assert said["memory's temperature as a value"] == NOT_SUPPORTED


def test_errors_are_those_of_nvml(said):
    """Wrong handles, sizes and versions of structures are refused as by the real library."""
    assert (said["fan"], said["a setter"]) == ("error 3", NOT_SUPPORTED)
    assert (said["no device"], said["no output"]) == ("error 2", INVALID)
    assert (said["short"], said["third"], said["uuid of none"]) == (TOO_SMALL, INVALID, NOT_FOUND)
    assert said["text of 3"] == "Not Supported"
    assert said["version 1"] == WRONG_VERSION
    assert said["version 2"] == [0, CARDS["a100"].total_bytes // MIB]
    assert said["shut down"] == [0, "error 1", UNINITIALIZED]


def test_memory_and_processes_are_those_of_all_processes_that_the_program_started(said):
    """A process counts with its context from its first allocation until it ends or is killed."""
    own, of_child = CONTEXT + 100, CONTEXT + 50
    assert said["before"] == [0, {}]
    assert said["allocated"] == [own, 0, True]
    assert said["seen by a fork"] == own
    assert said["seen by a child"] == own + of_child
    assert said["with a child"] == [own + of_child, True]
    assert said["child killed"] == [own, 1]
    assert said["freed"] == CONTEXT


def test_processes_that_use_more_than_a_card_together_are_pointed_out(said):
    """Each has a card for itself, so two can use more than there is; the card is then full."""
    is_full, processes, last_line = said["overfull"]
    assert (is_full, processes) == (True, 2)
    assert last_line.startswith("The processes together use more memory than the card has")


TORCH = """
import pynvml
pynvml.nvmlInit()
import torch
kept = torch.ones(2**20, device="cuda")
names = "utilization", "temperature", "power_draw", "clock_rate", "memory_usage"
print([getattr(torch.cuda, name)() for name in names])
used = torch.cuda.memory_reserved() + 512 * 2**20
print(torch.cuda.device_memory_used() == used)
print(f"uses {used / 2**20:12.3f} MB" in torch.cuda.list_gpu_processes())
"""


def test_torch_reports_the_state_of_the_card(python, tmp_path):
    """What torch asks NVML by pynvml, which is imported before torch, are numbers."""
    pytest.importorskip("pynvml")
    script = tmp_path / "program.py"
    script.write_text(TORCH, encoding="utf-8")
    run = python("-m", "emulated_cuda", "--no-values", str(script))
    assert run.stdout.splitlines() == ["[0, 30, 40000, 1410, 0]", "True", "True"], run.stderr


def test_nvidia_smi_prints_the_table(said):
    """The table has the usual columns, all lines of one width, and says that it is emulated."""
    status, table, errors = said["table"]
    assert (status, errors) == (0, "")
    total = CARDS["a100"].total_bytes // MIB
    assert re.search(
        r"^\|   0  NVIDIA A100-SXM4-80GB +Off \|   00000000:01:00\.0 Off ", table, re.MULTILINE
    )
    assert f"1174MiB /  {total}MiB" in table
    assert f"0MiB /  {total}MiB" in table
    assert " 40W /  400W |" in table
    assert re.search(
        r"\| NVIDIA-SMI (5\d\d\.00\.00) \(emulated\) +Driver Version: \1 +CUDA Version: 1", table
    )
    assert "\nEmulated by emulated_cuda, without a GPU." in table
    assert {len(line) for line in table.splitlines() if line.startswith(("|", "+"))} == {91}
    for process, size in zip(said["pids"], (612, 562), strict=True):
        assert re.search(
            rf"^\|    0   N/A  N/A +{process}      C   .*python\S* +{size}MiB \|$",
            table,
            re.MULTILINE,
        )


def test_nvidia_smi_prints_what_programs_parse(said):
    """``-L`` and comma-separated values are as on a card, and nothing is on stderr."""
    a100 = "NVIDIA A100-SXM4-80GB"
    assert said["list"][0::2] == [0, ""]
    assert said["list"][1].splitlines() == [
        f"GPU {index}: {a100} (UUID: GPU-00000000-0000-0000-0000-00000000000{index + 1})"
        for index in range(2)
    ]
    assert said["numbers"] == [0, "0, 1174, 0, 0, 40.00, [N/A]\n1, 0, 0, 0, 40.00, [N/A]\n", ""]
    assert said["one device"] == [0, "1\n", ""]
    status, text, errors = said["all fields"]
    header, *rows = text.splitlines()
    assert (status, errors, len(rows)) == (0, "", 2)
    assert [cell.split(" [")[0] for cell in header.split(", ")] == list(FIELDS)
    first = dict(zip(FIELDS, rows[0].split(", "), strict=True))
    assert (first["name"], first["compute_cap"], first["pstate"]) == (a100, "8.0", "P0")
    assert (first["memory.used"], first["clocks.max.sm"]) == ("1174 MiB", "1410 MHz")
    assert (first["ecc.mode.current"], first["serial"]) == ("Enabled", "[N/A]")
    uuid = "GPU-00000000-0000-0000-0000-000000000001"
    status, text, _ = said["processes"]
    header, *rows = text.splitlines()
    assert (status, header) == (0, "pid, used_memory [MiB], gpu_uuid")
    own, child = said["pids"]
    assert sorted(rows) == sorted([f"{own}, 612 MiB, {uuid}", f"{child}, 562 MiB, {uuid}"])
    long = said["long"][1]
    assert re.search(r"Used +: 1174 MiB", long)
    assert f"Process ID                                : {child}" in long
    assert "Temperature" not in long
    assert "Emulated by emulated_cuda" in long


def test_nvidia_smi_refuses_what_it_does_not_know(said):
    """An unknown option or field ends with an error that says what to do, and prints no value."""
    assert said["no such device"][:2] == [6, "No devices were found\n"]
    for case, message in (
        ("unknown field", 'field "nonsense" is not a valid field to query'),
        ("no format", "a query needs a format; add --format=csv"),
        ("unknown option", "unrecognized arguments: topo -m"),
    ):
        status, text, errors = said[case]
        assert (status, text) == (2, "")
        assert errors.startswith(f"nvidia-smi (emulated): {message}")


def test_nvidia_smi_without_a_device_says_so():
    """Outside an emulating program there is nothing to show."""
    with pytest.raises(DeviceError, match=r"EMULATED_CUDA is not in the environment; start"):
        Nvml({})


@pytest.mark.parametrize(("card", "figures"), [("t4", (6, 2, 3)), ("rtx4090", (8, 5, 4))])
def test_kinds_of_cards_differ(python, card, figures):
    """Architecture, brand and PCI generation are the card's; what it lacks is not supported."""
    code = f"""
import emulated_cuda
emulated_cuda.load("{card}", 2)
{ASK}
kinds = "Architecture", "Brand", "MaxPcieLinkGeneration"
print(json.dumps([[number("nvmlDeviceGet" + kind) for kind in kinds],
                  number("nvmlDeviceGetDefaultEccMode"), os.environ["PATH"].split(":")[0]]))
"""
    run = python("-c", code)
    kinds, ecc, folder = json.loads(run.stdout)
    assert tuple(kinds) == figures
    assert ecc == (1 if card == "t4" else f"error {NOT_SUPPORTED}")
    assert os.access(Path(folder, "nvidia-smi"), os.X_OK)


# ---- Names ----


@pytest.fixture(scope="module")
def exported(emulation) -> set[str]:
    """The names that the library defines."""
    spec = find_spec("emulated_cuda._nvml")
    assert spec is not None
    assert spec.origin is not None
    command = ["nm", "-D", "--defined-only", spec.origin]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in run.stdout.splitlines()}


@pytest.mark.sources
def test_library_defines_the_listed_functions_and_no_others(exported):
    """The list is what the library exports, functions with a body of their own included."""
    text = ROOT.joinpath("emulated_cuda/csrc/nvml/names.hpp").read_text(encoding="ascii")
    assert exported == set(re.findall(r"^X\((nvml\w+)\)$", text, re.MULTILINE))
    assert len(exported) > 400


def test_every_function_of_the_installed_pynvml_is_defined(exported):
    """A newer nvidia-ml-py may look up another function: add its name to the list."""
    pynvml = pytest.importorskip("pynvml")
    text = Path(pynvml.__file__).read_text(encoding="utf-8")
    looked_up = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"', text))
    assert looked_up
    assert sorted(looked_up - exported) == []
