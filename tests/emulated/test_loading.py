"""When the device is loaded: before torch, after it, twice, and where it is refused."""

import importlib.util
import re
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import emulated_cuda
from emulated_cuda.errors import DeviceError
from emulated_cuda.loading import library, loaded

pytestmark = pytest.mark.slow

EARLY = """
import emulated_cuda
assert emulated_cuda.loaded() is None
emulated_cuda.load("t4")
assert "torch" not in __import__("sys").modules
"""
LATE = """
import torch
import emulated_cuda
emulated_cuda.load("t4")
"""
USE = """
import torch
square = torch.ones(64, 64, device="cuda", requires_grad=True)
convolution = torch.nn.Conv2d(3, 8, 3).cuda()
(convolution(torch.ones(2, 3, 8, 8, device="cuda")).sum() + (square @ square).sum()).backward()
torch.linalg.lu_factor(torch.eye(4, device="cuda").expand(3, 4, 4))  # a library loaded on use
torch.special.airy_ai(square.detach())  # compiled when used
print(torch.cuda.get_device_name(), torch.cuda.memory_allocated() > 2 * square.nbytes)
emulated_cuda.load("t4")
try:
    emulated_cuda.load("h100")
except emulated_cuda.DeviceError as error:
    print(error)
print(emulated_cuda.loaded().card.name, emulated_cuda.loaded().title)
"""


THEN_WARNINGS_ARE_ERRORS = """
import torchvision
print(torch.ones(2, device="cuda").add(1).tolist())
"""


@pytest.fixture(scope="module")
def runs(python):
    """Return the processes that load the device before and after torch, with warnings as errors.

    The first is a new interpreter, which has not imported torch.
    """
    errors = "import warnings; warnings.simplefilter('error')"
    program = USE + THEN_WARNINGS_ARE_ERRORS
    return {
        "before torch": python("-W", "error", "-c", EARLY + program),
        "after torch": python("-c", errors + LATE + program, forked=True),
    }


@pytest.mark.parametrize("order", ["before torch", "after torch"])
def test_torch_finds_the_device(runs, order):
    """Torch finds the device whether or not it was imported before; a second card is refused."""
    run = runs[order]
    assert run.stdout.splitlines()[:-1] == [
        "Tesla T4 True",
        "this process already emulates 1 × NVIDIA T4 with 14,909 MB each, so it cannot emulate "
        "1 × NVIDIA H100 80GB with 81,008 MB each too; start another process for that device",
        "t4 emulated NVIDIA T4 (no GPU)",
    ], run.stderr


THEN_TORCHVISION = """
import torchvision
box = torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0]]).cuda()
print(tuple(torchvision.ops.roi_align(torch.ones(1, 4, 8, 8, device="cuda"), box, 2).shape))
"""


def test_library_that_is_imported_after_loading_finds_the_device(python):
    """A library that is imported after the device is loaded finds it, also if torch came first."""
    run = python("-c", LATE + THEN_TORCHVISION, forked=True)
    assert run.stdout.strip() == "(1, 4, 2, 2)", run.stderr


ASKED = """
import torch
print(torch.cuda.is_available())
import emulated_cuda
try:
    emulated_cuda.load()
except emulated_cuda.DeviceError as error:
    print(error)
print(torch.cuda.is_available(), emulated_cuda.loaded(), (torch.ones(3) + 1).sum().item())
"""


def test_torch_that_was_asked_for_devices_before_is_refused(python):
    """If torch was asked for devices before, it keeps its answer,
    so loading a device is refused.
    """
    first, message, *rest = python("-c", ASKED, forked=True).stdout.splitlines()
    assert first == "False"
    assert message.startswith("it is too late to load the emulated CUDA device: this process has")
    assert "move calls to torch.cuda.is_available()" in message
    assert rest == ["False None 6.0"]


VISIBLE = """
import ctypes
import emulated_cuda
emulated_cuda.load("a100", 3)
cuda, text, buses = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(20), []
while cuda.cudaDeviceGetPCIBusId(text, 20, len(buses)) == 0:
    buses.append(text.value.decode())
print(buses, cuda.cudaGetDeviceCount(ctypes.byref(ctypes.c_int())))
"""


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", "['0000:03:00.0', '0000:01:00.0'] 0"),
        ("1,7,0", "['0000:02:00.0'] 0"),
        ("GPU-00000000-0000-0000-0000-000000000003", "['0000:03:00.0'] 0"),
        ("", "[] 100"),
    ],
)
def test_visible_devices_are_chosen_as_by_the_real_runtime(python, visible, expected):
    """Visible devices are chosen as by the real runtime: an invalid entry hides those after it."""
    run = python("-c", VISIBLE, CUDA_VISIBLE_DEVICES=visible)
    assert run.stdout.strip() == expected, run.stderr


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    """Forget the device of this session, which may run on an emulated one."""
    monkeypatch.setattr(loaded, "_loaded", None)


def refusal(**arguments) -> str:
    """Return the message with which loading is refused, before anything is loaded."""
    with pytest.raises(DeviceError) as raised:
        emulated_cuda.load(**arguments)
    assert emulated_cuda.loaded() is None
    return str(raised.value)


@pytest.fixture
def torch_version(emulation, tmp_path, monkeypatch):
    """Have another version of torch be installed."""

    def install(text: str) -> None:
        (tmp_path / "version.py").write_text(text, encoding="utf-8")
        found = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
        real = importlib.util.find_spec
        monkeypatch.setattr(library, "find_spec", lambda n: found if n == "torch" else real(n))

    return install


def test_cpu_build_of_torch_is_refused(torch_version):
    """The CPU build of torch has no code for CUDA devices, so it is refused."""
    torch_version("__version__ = '2.15.0+cpu'\ncuda: str | None = None\n")
    assert refusal() == (
        "an emulated CUDA device requires a CUDA build of torch, but torch 2.15.0+cpu was built "
        "without CUDA; install a CUDA build (on Linux: pip install torch), or measure on the CPU"
    )


def test_build_for_another_cuda_version_is_refused(torch_version):
    """Another CUDA version may have changed the runtime's structures, so its build is refused."""
    torch_version("__version__ = '3.1.0+cu140'\ncuda: str | None = '14.0'\n")
    assert "for CUDA 14.0; install another build, or measure on the CPU" in refusal()


@pytest.mark.parametrize(("card", "cuda"), [("v100", "13.0"), ("rtx5090", "12.6")])
def test_card_that_torch_has_no_kernels_for_is_refused(torch_version, card, cuda):
    """A card for which torch has no kernels is refused, because a real one would not work."""
    torch_version(f"__version__ = '2.12.0'\ncuda: str | None = '{cuda}'\n")
    message = refusal(card=card)
    assert f"torch for CUDA {cuda} has no kernels for the NVIDIA" in message
    assert message.endswith("; write the name of another card")


@pytest.mark.parametrize(
    ("system", "machine"), [("darwin", "arm64"), ("win32", "AMD64"), ("linux", "aarch64")]
)
def test_other_platform_is_refused(monkeypatch, system, machine):
    """Another platform is refused before anything else is looked at."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    assert refusal() == (
        f"an emulated CUDA device requires Linux on x86-64, but this machine has {system} on "
        f"{machine}; run it on Linux, for example in CI, or measure on the CPU"
    )


def test_library_that_was_not_compiled_is_refused(emulation, monkeypatch):
    """If the library was not compiled, the error says how to compile it."""
    real = importlib.util.find_spec
    ours = "emulated_cuda._cuda"
    monkeypatch.setattr(library, "find_spec", lambda n: None if n == ours else real(n))
    message = refusal()
    assert f"compiled library {ours}, which is missing" in message
    assert message.endswith("--no-binary pytest-cka-memory pytest-cka-memory)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"card": "a1000"}, "unknown card 'a1000'"),
        ({"devices": 0}, "cannot emulate 0 devices; write a number from 1 to 16"),
        ({"devices": 17}, "cannot emulate 17 devices"),
        (
            {"total_bytes": 2**29},
            "with 512 MB of memory, because the CUDA context alone takes 512 MB",
        ),
    ],
)
def test_wrong_argument_is_refused(arguments, message):
    """The error for a wrong argument names the argument."""
    assert message in refusal(**arguments)


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
import emulated_cuda
try:
    emulated_cuda.load("t4", 2)
except emulated_cuda.DeviceError as error:
    print(error, emulated_cuda.loaded())
"""


def test_limit_of_the_address_space_is_refused(python):
    """With a limited address space, each allocation would fail for lack of memory: an error."""
    message = python("-c", LIMITED).stdout
    assert message.startswith("the system refused the 512 GB of address space")
    assert message.endswith("do not set vm.overcommit_memory to 2 None\n")


DRIVER = """
#include <stdlib.h>
int calls, is_started;
int cuInit(unsigned flags) {
  ++calls;
  if (getenv("DRIVER_WITHOUT_GPU")) return 100;
  is_started = 1;
  return 0;
}
int cuDeviceGetCount(int *count) { *count = 1; return is_started ? 0 : 3; }
int cuOfTheDriverAlone(void) { return ++calls; }
"""
"""All other functions of the driver of a GPU follow, which count how often they are called. That of
the number of devices does not count, because it is asked whether the driver is started."""
LOADED = """
import os
folder = os.environ["LD_LIBRARY_PATH"]
print([name for name in os.listdir(folder) if f"{folder}/{name}" in open("/proc/self/maps").read()])
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """Return a folder with libraries that the linker takes for the driver of a GPU."""
    if None in map(shutil.which, ("gcc", "nm")):
        pytest.skip("requires gcc and nm")
    folder = tmp_path_factory.mktemp("driver")
    symbols = subprocess.check_output(["nm", "-D", library.path_of_compiled(library.LIBRARY)])
    names = {*re.findall(r"\bcu[A-Z]\w+", symbols.decode())} - {"cuInit", "cuDeviceGetCount"}
    assert "cuGetProcAddress_v2" in names
    others = [f"int {name}(void) {{ ++calls; return 3; }}" for name in sorted(names)]
    (folder / "driver.c").write_text("\n".join([DRIVER, *others]), encoding="utf-8")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, "driver.c"]
        subprocess.run(command, cwd=folder, check=True)
    return folder


MAPPED = "import ctypes\nctypes.CDLL('libcuda.so.1')\n"  # and not started


@pytest.mark.parametrize(
    ("start", "found"),
    [(EARLY, []), (LATE, ["libcuda.so.1"]), (MAPPED + EARLY, ["libcuda.so.1"])],
    ids=["before torch", "after torch", "after the driver"],
)
def test_device_is_emulated_beside_a_driver(python, driver, start, found):
    """On a machine with a GPU, code finds the emulated device, also where torch was imported."""
    run = python("-c", start + USE + LOADED, LD_LIBRARY_PATH=str(driver))
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == "Tesla T4 True"
    assert run.stdout.splitlines()[-1] == str(found)  # cuBLAS has loaded the driver with torch


LOADED_LATE = """
import ctypes, os, sys
if sys.argv[1] == "torch":
    import torch
path = os.environ["LD_LIBRARY_PATH"] + "/libcuda.so.1"
driver = ctypes.CDLL(path, mode=os.RTLD_NOLOAD if sys.argv[1] == "torch" else os.RTLD_NOW)
calls = ctypes.c_int.in_dll(driver, "calls")
before = calls.value
"""
USED = """
import emulated_cuda
emulated_cuda.load("a100")
import torch
query = torch.ones(1, 2, 8, 16, device="cuda", dtype=torch.half)
print(torch.ops.aten._scaled_dot_product_cudnn_attention(query, query, query, None, True)[0].sum())
print(torch.linalg.svdvals(torch.eye(3, device="cuda")).sum())
print(calls.value - before, hasattr(driver, "cuOfTheDriverAlone"))
"""


@pytest.mark.parametrize("first", ["torch", "driver"])
def test_no_library_of_nvidia_calls_the_driver_of_the_machine(python, driver, first):
    """The copy of the runtime in cuDNN, and the runtime that MAGMA calls while it is loaded, find
    the emulated driver, although the machine's was loaded before: by torch, or by the program.
    """
    run = python("-c", LOADED_LATE + USED, first, LD_LIBRARY_PATH=str(driver))
    assert run.returncode == 0, run.stderr
    attention, values, calls = run.stdout.splitlines()
    assert attention.startswith("tensor(256., device='cuda:0', dtype=torch.float16")
    assert values.startswith("tensor(3., device='cuda:0'")
    assert calls == "0 False"


REFUSED = """
import torch
assert not torch.cuda.is_available()  # so torch remembers that there are no devices
before = calls.value
import emulated_cuda
try:
    emulated_cuda.load()
except emulated_cuda.DeviceError as error:
    print(error)
print(driver.cuMemAlloc_v2(), driver.cuOfTheDriverAlone() - before)
"""


def test_driver_of_the_machine_is_as_before_if_it_is_too_late(python, driver):
    """The functions of the machine's driver are found again if the device cannot be loaded."""
    given = {"LD_LIBRARY_PATH": str(driver), "DRIVER_WITHOUT_GPU": "1"}
    run = python("-c", LOADED_LATE + REFUSED, "torch", **given)
    error, calls = run.stdout.splitlines()
    assert "has already asked torch for CUDA devices" in error
    assert calls == "3 2", run.stderr


OF_DRIVER = """
import ctypes, os, sys, torch
for library in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    ctypes.CDLL(library).cuInit(0)
    import emulated_cuda
    try:
        emulated_cuda.load()
    except emulated_cuda.DeviceError as error:
        print(library, type(error).__name__, error)
    sys.exit()
"""
LIBRARIES = "libcuda.so.1", "libnvidia-ml.so.1"


@pytest.fixture(scope="module")
def of_driver(python, driver):
    """Return the run of processes, each of which uses one library of the machine's driver."""
    return python("-c", OF_DRIVER, *LIBRARIES, LD_LIBRARY_PATH=str(driver))


@pytest.mark.parametrize("library", LIBRARIES)
def test_process_that_uses_another_driver_is_refused(of_driver, driver, library):
    """If a process uses the driver of the machine's GPU, it would go on to do so: an error."""
    line = of_driver.stdout.splitlines(keepends=True)[LIBRARIES.index(library)]
    assert line == (
        f"{library} TooLateError it is too late to load the emulated CUDA device: it replaces "
        f"NVIDIA's driver, but this process already uses {driver / library}; load the emulated "
        "device before any code asks torch for devices, and move calls to "
        "torch.cuda.is_available(), torch.cuda.device_count() and torch.accelerator from the top "
        "level of conftest.py, plugins and modules into functions\n"
    ), of_driver.stderr


@pytest.mark.parametrize("order", ["before torch", "after torch"])
def test_device_is_loaded_while_warnings_are_errors(runs, order):
    """Torch up to 2.12 warns about kernels that are registered before its own; it is no error."""
    run = runs[order]
    assert (run.stdout.splitlines()[-1:], run.returncode) == (["[2.0, 2.0]"], 0), run.stderr
