"""``MemoryProbe("emulate:cuda")`` in a script and in a notebook."""

import nbformat
import pytest
from nbclient import NotebookClient

EARLY = """
from pytest_cka_memory import DeviceError, MemoryProbe
probe = MemoryProbe("emulate:cuda:t4")
"""
LATE = """
import torch
model = torch.nn.Linear(4, 4)
from pytest_cka_memory import DeviceError, MemoryProbe
probe = MemoryProbe("emulate:cuda:t4")
"""
MEASURE = """
import torch
kept = []
with probe.measure() as region:
    torch.ones(2**18, device="cuda")
    kept.append(torch.ones(2**18, dtype=torch.uint8, device=probe.device))
print(probe.meter.device, "|", probe.meter.device_name, "|", probe.device)
print(region.peak_increase_bytes, region.retained_bytes, region.retained[0].held_by)
"""
MEASURED = [
    "emulate:cuda:t4 | emulated NVIDIA T4 (no GPU) | cuda:0",
    f"{2**20} {2**18} __main__.kept[0]",
]
OTHERS = """
assert MemoryProbe("emulate:cuda:t4").meter is MemoryProbe("cuda").meter is probe.meter
for name in ("emulate:cuda:h100", "emulate:cuda:t4,devices=2", "emulate:cuda:t1"):
    try:
        MemoryProbe(name)
    except DeviceError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.emulates
@pytest.mark.parametrize("start", [EARLY, LATE], ids=["before-torch", "after-torch"])
def test_script_measures_the_emulated_device(python, start):
    """A script may import torch before it emulates a device; a process has one kind of device."""
    run = python("-c", start + MEASURE + OTHERS, forked=start is LATE)
    *measured, card, devices, unknown = run.stdout.splitlines() or [run.stderr] * 3
    assert measured == MEASURED
    for message in (card, devices):
        assert "is not available: this process already emulates 1 × NVIDIA T4 with" in message
        assert message.endswith("; start another process for that device")
    assert unknown.startswith("unknown card 't1'; write emulate:cuda, or emulate:cuda: and one of")


REFUSED = """
from pytest_cka_memory import DeviceError, MemoryProbe
import emulated_cuda
auto = MemoryProbe("auto")
print(auto.device, MemoryProbe().device, emulated_cuda.loaded() is not None)
try:
    MemoryProbe("emulate:cuda")
except DeviceError as error:
    print(error)
print(auto.meter is MemoryProbe("auto").meter, emulated_cuda.loaded() is not None)
"""


@pytest.mark.emulates
def test_auto_never_emulates_a_device(python):
    """``auto`` means the CPU without a GPU; torch has looked for devices then, too late for one."""
    first, message, last = python("-c", REFUSED, forked=True).stdout.splitlines()
    assert first == "cpu cpu False"
    assert message.startswith("device 'emulate:cuda' is not available: it is too late to load the ")
    assert (
        "; load the emulated device before any code asks torch for devices, and move calls to "
        "torch.cuda.is_avail"
    ) in message
    assert last == "True False"


HIDDEN = """
from pytest_cka_memory import DeviceError, MemoryProbe
try:
    MemoryProbe("emulate:cuda,devices=2")
except DeviceError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.emulates
@pytest.mark.parametrize("forked", [False, True], ids=["before-torch", "after-torch"])
def test_device_that_the_environment_hides_is_refused(python, forked):
    """A device hidden by CUDA_VISIBLE_DEVICES is refused, and the message names the variable."""
    assert python("-c", HIDDEN, forked=forked, CUDA_VISIBLE_DEVICES="2").stdout == (
        "device 'emulate:cuda,devices=2' is not available: CUDA_VISIBLE_DEVICES is '2', which "
        "hides it from torch; unset the variable, or set it to 0\n"
    )


UNMEASURABLE = """
from pytest_cka_memory import DeviceError, MemoryProbe
try:
    MemoryProbe("emulate:cuda")
except DeviceError as error:
    print(error)
"""


@pytest.mark.emulates
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "its allocator counts nothing; if PYTORCH_NO_CUDA"),
        # PYTORCH_ALLOC_CONF with an unknown key is ignored by torch 2.9.
        ("PYTORCH_CUDA_ALLOC_CONF", "nonsense:1", "device 'cuda' is not available: Unrecognized"),
    ],
)
def test_environment_in_which_torch_counts_nothing_is_refused(python, variable, value, message):
    """An environment without torch's caching allocator is refused, since every peak would be 0."""
    assert message in python("-c", UNMEASURABLE, forked=True, **{variable: value}).stdout


@pytest.mark.slow
@pytest.mark.emulates
@pytest.mark.filterwarnings("ignore")  # nbclient and ipykernel warn
def test_notebook_measures_the_emulated_device(monkeypatch, tmp_path):
    """A notebook measures an emulated device across cells, also after one that imported torch.

    A kernel may send what one cell prints in several messages; each is an output of the cell.
    """
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cells = [nbformat.v4.new_code_cell(text) for text in (LATE, MEASURE)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert printed.splitlines() == MEASURED
