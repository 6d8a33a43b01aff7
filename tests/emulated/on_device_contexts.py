"""Tests of computed values in threads, transforms, modes and other libraries, and of their cost.

``test_on_device.py`` runs them in a new process with the plugin ``values_on_both``.
"""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from values_on_both import MB, on_both

from emulated_cuda import activation
from emulated_cuda.values import operators
from pytest_cka_memory import MemoryProbe

# ---- Random numbers ----


def test_random_numbers_repeat_with_the_generator_of_the_device():
    """Random numbers repeat by seed, by state, and by a generator that the user made."""
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.randn(5, device="cuda")
    second = F.dropout(torch.ones(20, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(5, device="cuda"), first)
    assert torch.equal(F.dropout(torch.ones(20, device="cuda")), second)
    assert not torch.equal(torch.randn(5, device="cuda"), first)
    own = [torch.Generator("cuda").manual_seed(7) for _ in range(2)]
    one, other = (torch.rand(5, device="cuda", generator=generator) for generator in own)
    assert torch.equal(one, other)


def test_random_numbers_do_not_change_those_of_the_cpu():
    """Random numbers on the device leave the CPU's unchanged: each has a generator of its own."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    F.dropout(torch.ones(20, device="cuda"))
    torch.randperm(100, device="cuda")
    assert torch.equal(torch.rand(3), expected)


# ---- Threads and transforms ----


def test_values_are_computed_in_every_thread():
    """Values are computed in threads of the user and in torch's backward threads."""
    found = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            found.append((threading.current_thread().name, (gradient * 3).sum().item()))
            return gradient * 2

    def work():
        leaf = torch.ones(3, device="cuda", requires_grad=True)
        Doubled.apply(leaf).sum().backward()
        found.append(("", leaf.grad.sum().item()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [value for _, value in found] == [9.0, 6.0]


def test_transforms_give_the_cpus_results():
    """``torch.func`` and checkpointing run operators in other contexts, with the CPU's results."""
    x = torch.randn(4, 3)
    on_both(lambda t: torch.func.vmap(torch.func.grad(lambda r: r.sin().sum()))(t), x)
    on_both(lambda t: torch.func.jacrev(lambda r: r.square().cumsum(0))(t[0]), x)
    on_both(lambda t: torch.func.jvp(lambda r: r.exp(), (t,), (t,)), x)
    on_both(lambda t: checkpoint(lambda r: r.tanh() * 2, t, use_reentrant=False), x, gradients=True)
    leaf = x.cuda().requires_grad_()
    checkpoint(lambda r: r.tanh() * 2, leaf, use_reentrant=True).sum().backward()
    torch.testing.assert_close(leaf.grad.cpu(), 2 - 2 * x.tanh().square())


def test_modes_of_the_user_and_the_meter_see_operators_once():
    """A user's mode sees each operator once, and never those that compute its values."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    leaf = torch.ones(3, device="cuda", requires_grad=True)
    with Names():
        total = (leaf * 2).sum()
        total.backward()
        assert total.item() == 6
    assert seen.count("aten.mul.Tensor") == 2
    assert not any("as_strided" in name for name in seen)
    with torch.device("cuda"):
        assert (torch.ones(2) + torch.arange(2)).tolist() == [1, 2]


def test_autocast_and_gradient_scaling_work():
    """Autocast computes values of half precision, and infinite gradients reduce the scale."""
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**4)
    before = model.weight.detach().clone()
    with torch.autocast("cuda"):
        loss = model(torch.ones(2, 4, device="cuda")).square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)
    model.weight.grad.fill_(float("inf"))
    scaler.scale(torch.ones((), device="cuda"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**3


def test_compiled_functions_with_graph_breaks_are_computed():
    """Dynamo must not compile the code that computes values, as it would after a graph break."""

    @torch.compile(backend="eager")
    def selected(x):
        positive = x[x > 0]
        return positive.sum() + torch.unique(x).numel() + positive.max().item()

    on_both(selected, torch.tensor([1.0, -2, 3, 3]))
    torch.compiler.reset()


def test_library_with_its_own_operators_is_computed():
    """Torchvision's own operators are computed, although it is
    imported after loading the device.
    """
    torchvision = pytest.importorskip("torchvision")
    boxes = torch.rand(20, 4) * 10
    boxes[:, 2:] += boxes[:, :2]
    on_both(lambda b: torchvision.ops.nms(b, b[:, 0], 0.3), boxes)
    on_both(lambda b: torchvision.ops.box_iou(b, b), boxes)
    image, regions = torch.rand(1, 2, 16, 16), torch.tensor([[0.0, 0, 0, 8, 8]])
    on_both(lambda i, r: torchvision.ops.roi_align(i, r, 4), image, regions)


def test_operators_of_the_user_in_python_compute_what_they_call():
    """An operator that a user wrote in Python is computed, also if a library is loaded after it."""

    @torch.library.custom_op("emulated_tests::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    activation.register_new_operators()
    assert twice(torch.ones(3, device="cuda")).tolist() == [2, 2, 2]


# ---- Memory ----


def live_aliases() -> int:
    """Return the number of CPU tensors on the storage of all addresses."""
    gc.collect()
    return sum(
        value.untyped_storage().nbytes() >= 2**40
        for value in gc.get_objects()
        if type(value) is torch.Tensor and value.device.type == "cpu"
    )


def test_no_alias_is_found_among_live_tensors():
    """Computing a value leaves no alias of its memory, which the
    CPU meter would count as storage.
    """
    before = live_aliases()  # the traceback of a test that failed may reference some
    (torch.ones(3, device="cuda") + 1).sum().item()
    assert live_aliases() == before


def test_computing_on_the_cpu_retains_nothing_on_the_host():
    """Computing on the CPU retains nothing on the host; only what the user copies there counts."""
    kept = []

    def compute():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout())
        model.append(nn.Linear(144, 5)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            x = torch.randn(8, 3, 8, 8, device="cuda")
            F.cross_entropy(model(x), torch.arange(8, device="cuda") % 5).backward()
            optimizer.step()
            optimizer.zero_grad()
        nn.LSTM(4, 4).cuda()(x.reshape(-1, 2, 4))
        torch.linalg.svd(x[0, 0])
        x.reshape(-1)[1:].view(torch.uint8)[1:].sort()
        torch.eye(5, device="cuda").to_sparse().sum().item()
        x.unique(), x.nonzero(), x.to(torch.float8_e4m3fn)
        kept.append(x.mean((0, 2, 3)))

    with MemoryProbe("cuda").measure() as region:
        compute()
    assert (region.retained_bytes, region.host_retained_bytes) == (12, 0)
    with MemoryProbe("cuda").measure() as region:
        kept.append(kept[0].cpu())
    assert (region.retained_bytes, region.host_retained_bytes) == (0, 12)


def test_zeros_take_no_memory_of_the_machine():
    """A large tensor of zeros is not committed, so it takes no memory of the machine."""
    before = resident_bytes()
    kept = torch.zeros(512 * MB, dtype=torch.uint8, device="cuda")
    assert resident_bytes() - before < 64 * MB
    assert kept[::MB].sum().item() == 0


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * 4096


def test_library_reads_answers_in_order_and_forgets_them():
    """Numbers that one operator did not read back must not reach the next one."""
    library = operators.library()
    library.announce(5)
    library.forget_answers()
    assert torch.nonzero(torch.tensor([0, 1], device="cuda")).tolist() == [[1]]
