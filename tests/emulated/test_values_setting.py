"""Values are computed unless ``values=off`` says otherwise or the torch version cannot."""

import pytest
import torch

from emulated_cuda import torch_versions
from emulated_cuda.errors import WITHOUT_VALUES as REMEDY

pytestmark = pytest.mark.emulates

SETTINGS = """
import sys
from pytest_cka_memory import MemoryProbe
probe = MemoryProbe("emulate:cuda:t4" + sys.argv[1])
import torch
print((torch.ones(3, device="cuda") + 1).sum().item(), torch.ones(3, device="cuda").nonzero().shape)
print([note for note in probe.meter.notes if "values" in note][0])
"""


@pytest.mark.parametrize(
    ("setting", "numbers", "note"),
    [
        ("", "6.0 torch.Size([3, 1])", "torch computes the values on the CPU, not with"),
        (",values=on", "6.0 torch.Size([3, 1])", "torch computes the values on the CPU"),
        (",values=off", "0.0 torch.Size([0, 1])", "no values are computed: tensors on the"),
    ],
    ids=["default", "on", "off"],
)
def test_setting_decides_whether_values_are_computed(python, setting, numbers, note):
    """A setting decides whether values are computed, and the meter's notes say which it was."""
    run = python("-c", SETTINGS, setting, forked=True)
    first, second = run.stdout.splitlines() or [run.stderr] * 2
    assert first == numbers
    assert second.startswith(note)


COPIES = """
import sys
import emulated_cuda
emulated_cuda.load("h100", values=sys.argv[1] == "on")
import torch

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 // 2**20

torch.ones(1, device="cuda")
small, large = torch.arange(2**17, dtype=torch.int64), torch.empty(2**26)
before = resident()
there = large.cuda()
print(resident() - before > 100)
print(torch.equal(small.cuda().cpu(), small), there[:2].cpu().tolist())
large[:2] = 5
print(large.cuda()[:2].cpu().tolist())
"""


@pytest.mark.parametrize(
    ("setting", "printed"),
    [
        ("on", ["True", "True [0.0, 0.0]", "[5.0, 5.0]"]),
        ("off", ["False", "True [0.0, 0.0]", "[0.0, 0.0]"]),
    ],
)
def test_without_values_large_copies_touch_no_memory(python, setting, printed):
    """Weights that nobody computes with are not read and not written; up to 1 MB is copied."""
    assert python("-c", COPIES, setting, forked=True).stdout.splitlines() == printed


COPIES_BACK = """
import sys, tempfile
import emulated_cuda
emulated_cuda.load("h100", values=sys.argv[1] == "on")
import torch

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

saved, zeros = torch.empty(2**26, device="cuda"), torch.zeros(2**20, device="cuda")
torch.ones(2**20, device="cuda").cpu()
used = torch.full((2**24,), 7.0)
before = resident()
on_host = saved.cpu()
print(resident() - before > 200, on_host.abs().max().item())
before = resident()
used.copy_(saved[:2**24])
print(before - resident() > 40, used.abs().max().item())

pieces = torch.zeros(2**20, dtype=torch.int64, device="cuda")
pieces[2**17 + 1:2**18 + 1] = torch.arange(2**17)
found = pieces.cpu()
print(found[2**17 + 1:2**18 + 1].equal(torch.arange(2**17)), found.count_nonzero().item())

with tempfile.NamedTemporaryFile() as file:
    file.write(b"seven" * 2**20)
    file.flush()
    for shared in (False, True):
        of_file = torch.from_file(file.name, shared=shared, size=2**20)
        print(of_file.count_nonzero().item(), of_file.copy_(zeros).count_nonzero().item())
shared = torch.ones(2**20).share_memory_()
pinned = torch.ones(2**20).pin_memory()
before = resident()
print(shared.copy_(zeros).count_nonzero().item(), pinned.copy_(zeros).count_nonzero().item())
print(round(resident() - before))
"""


@pytest.mark.parametrize(
    ("setting", "fresh", "used"),
    [("on", "True 0.0", "False 0.0"), ("off", "False 0.0", "True 0.0")],
    ids=["on", "off"],
)
def test_large_copies_to_the_host_commit_only_what_was_written_on_the_device(
    python, setting, fresh, used
):
    """Activations that are saved on the host take none of its memory without values.

    What the host reads is the same as with a copy of all bytes: zeros, and pieces that were copied
    to the device, also in the memory of a file, in shared memory and in pinned memory.
    """
    printed = python("-c", COPIES_BACK, setting, forked=True).stdout.splitlines()
    assert printed[:2] == [fresh, used]
    assert printed[2:] == ["True 131071", "1048576 0", "1048576 0", "0 0", "0"]


OTHER = """
from pytest_cka_memory import DeviceError, MemoryProbe
MemoryProbe("emulate:cuda:t4,values=off")
MemoryProbe("emulate:cuda:t4")
try:
    MemoryProbe("emulate:cuda:t4,values=on")
except DeviceError as error:
    print(error)
"""


def test_process_has_values_for_all_of_its_devices_or_for_none(python):
    """All devices of a process have values or none do; a name without the setting fits both."""
    assert python("-c", OTHER, forked=True).stdout.startswith(
        "device 'emulate:cuda:t4,values=on' is not available: "
        "this process already emulates 1 × NVIDIA T4 with 14,909 MB each, without values, so "
        "it cannot emulate 1 × NVIDIA T4 with 14,909 MB each, with values too"
    )


WITHOUT_KERNELS = """
import torch
del torch.library.get_kernel
from pytest_cka_memory import DeviceError, MemoryProbe
try:
    MemoryProbe("emulate:cuda:t4,values=on")
except DeviceError as error:
    print(error)
"""
OLD_BY_DEFAULT = """
import torch
del torch.library.get_kernel
from pytest_cka_memory import MemoryProbe
probe = MemoryProbe("emulate:cuda:t4")
print((torch.ones(3, device="cuda") + 1).sum().item())
print(*(note for note in probe.meter.notes if "values" in note), sep="\\n")
"""


@pytest.mark.slow
def test_torch_version_that_cannot_compute_values_emulates_memory_only(python):
    """Without computed values a torch version emulates memory only; the notes say why.

    If values were asked for, it is an error. No module that needs what is missing is imported
    before, so these are new interpreters.
    """
    assert "lacks torch.library.get_kernel, and the emulated device needs them to compute" in (
        python("-c", WITHOUT_KERNELS).stdout
    )
    number, note, warning = python("-c", OLD_BY_DEFAULT).stdout.splitlines()
    assert number == "0.0"
    assert note.startswith("no values are computed: tensors on the device hold zeros or stale")
    assert warning == (
        f"warning: no values are computed: torch {torch.__version__} lacks "
        "torch.library.get_kernel, and the emulated device needs them to compute values; install "
        f"a tested version (torch {torch_versions.RANGE}), or {REMEDY}"
    )


AFTER_TORCH = """
import torch
model = torch.nn.Linear(2, 1)
from pytest_cka_memory import MemoryProbe
probe = MemoryProbe("emulate:cuda")
with probe.measure() as region:
    loss = model.cuda()(torch.ones(4, 2, device="cuda")).square().sum()
    loss.backward()
print(loss.item() > 0, region.peak_increase_bytes > 0)
"""


def test_values_are_computed_inside_regions_and_if_torch_was_imported_before(python):
    """Values are computed inside regions and without a context, also if torch came first."""
    assert python("-c", AFTER_TORCH, forked=True).stdout.split() == ["True", "True"]


GLOO = """
import os
import emulated_cuda
emulated_cuda.load("a100")
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[0])
model(torch.ones(2, 4, device="cuda")).square().sum().backward()
print(bool((model.module.weight.grad != 0).any()))
compiled = torch.compile(lambda x: x.sin() + 1, backend="aot_eager")
print(torch.equal(compiled(torch.zeros(3, device="cuda")), torch.ones(3, device="cuda")))
scripted = torch.jit.script(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid()))
print([scripted(torch.zeros(2, device="cuda")).tolist() for _ in range(4)][-1])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_wrapped_traced_and_scripted_models_compute_values(python):
    """Models over gloo, traced by ``torch.compile``, or scripted compute values."""
    run = python("-c", GLOO, forked=True)
    expected = ["True", "True", "[0.5, 0.5]"]
    # Gloo of torch 2.9 prints how many ranks are connected.
    printed = [line for line in run.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert printed == expected, run.stderr
    assert run.returncode == 0, run.stderr


CHECKING = """
import emulated_cuda
emulated_cuda.load("a100", values=VALUES)
import torch
from torch import distributions

def check():
    mean = torch.rand(64, 64, device="cuda")
    normal = distributions.Normal(mean, mean)
    chosen = distributions.Categorical(logits=mean).sample()
    loss = normal.log_prob(normal.rsample()).mean() + chosen.sum()
    if not torch.isfinite(loss) or not loss.isfinite().item() or torch.isnan(loss).any():
        raise ValueError("loss is not finite")
    finite = torch.isfinite(mean), torch.isfinite(loss)
    return finite

kept = check()
print(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated(), bool(kept[1]))
flags = torch.stack([torch.isfinite(kept[1]), torch.isnan(kept[1])])  # as others on the device
print(flags.device, torch.func.vmap(torch.isfinite)(kept[0]).shape)
print(kept[0].device, torch.isfinite(torch.tensor(torch.inf)).item())
try:
    distributions.Normal(0.0, -1.0)
except ValueError:
    print("refused")
"""


def test_checks_that_values_are_valid_pass_without_values_and_take_their_memory(python):
    """Distributions and a loss on the device are accepted; what is on the CPU is checked."""
    run, off = (
        python("-c", CHECKING.replace("VALUES", values), forked=True)
        for values in ("True", "False")
    )
    assert off.stdout == run.stdout, off.stderr
    peak, rest = run.stdout.split(" ", 1)
    assert int(peak) > 64 * 64 * 4
    assert rest.splitlines()[1:] == [
        "cuda:0 torch.Size([64, 64])",
        "cuda:0 False",
        "refused",
    ]


TRAINING = """
import emulated_cuda
emulated_cuda.load("a100")
import torch
from torch import nn
from torch.nn import functional as F
import torchvision

class Words(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.embedding, self.inner, self.output = nn.Embedding(50, 32), inner, nn.Linear(32, 50)
    def forward(self, x):
        found = self.inner(self.embedding(x))
        return self.output(found[0] if isinstance(found, tuple) else found)

def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return Words(nn.TransformerEncoder(layer, 2))

def losses(make, device):
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(20):
        if isinstance(model, Words):
            x = torch.randint(50, (4, 12))
            y = x.roll(1, 1).flatten()
        else:
            x, y = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
        loss = F.cross_entropy(model(x.to(device)).flatten(0, -2), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()

for make in (
    lambda: torchvision.models.resnet18(num_classes=10),
    transformer,
    lambda: Words(nn.LSTM(32, 32, 2, batch_first=True)),
):
    pairs = zip(list(losses(make, "cpu")), list(losses(make, "cuda")), strict=True)
    print(max(abs(one - other) for one, other in pairs))
"""


@pytest.mark.slow
def test_training_has_the_losses_of_the_cpu(python):
    """ResNet-18, a transformer and an LSTM have the losses of the CPU over 20 steps."""
    run = python("-c", TRAINING, forked=True)
    found = [float(line) for line in run.stdout.splitlines()]
    assert len(found) == 3, run.stderr
    assert max(found) < 1e-4
