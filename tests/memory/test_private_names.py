"""Without each private name of torch: what is measured stays right, or what it costs is said."""

import gc
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from pytest_cka_memory import DeviceError, MemoryProbe, RegionRecord
from pytest_cka_memory.holders.survivors import holdings
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.cpu import CpuMeter
from pytest_cka_memory.meters.ledger import ledger

MODES = "does not tell which dispatch modes are on"
TOLD = {
    "torch._C.DisableTorchFunction": "modes see what the meter asks",
    "torch._C.DisableTorchFunctionSubclass": "subclasses of tensors see",
    "torch.utils._mode_utils.no_dispatch": "may count anew",
    "torch._C._current_graph_task_id": "an accelerator's backward pass",
    "torch._C._is_tracing": None,
    "torch.jit.is_tracing": None,
    "torch.UntypedStorage._cdata": None,
    "torch.Tensor._indices": "not coalesced are not counted",
    "torch.Tensor._values": "not coalesced are not counted",
    "torch.Tensor._is_view": "every part of a larger storage a view",
    "torch.Tensor._backward_hooks": "what its hooks hold",
    "torch.Tensor._post_accumulate_grad_hooks": "what its hooks hold",
    "torch.jit._get_trace_graph": "torch.onnx may trace code wrongly",
    "torch.utils._python_dispatch._get_current_dispatch_mode": MODES,
    "torch.utils._python_dispatch._pop_mode": MODES,
    "torch.utils._python_dispatch._push_mode": MODES,
}
"""Every name that can be missed -> what the report then says; None where nothing is lost."""
NEEDED = [
    (need, name, path)
    for need in torch_private._NEEDED
    for name, path in torch_private._NEEDED[need].items()
]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Look up every name anew, as in a torch that lacks some; returns all that were looked up."""
    find = pkgutil.resolve_name

    def without(*paths: str) -> list[str]:
        asked: list[str] = []

        def resolve(path: str) -> object:
            asked.append(path)
            if path in paths:
                raise AttributeError(path)
            return find(path)

        monkeypatch.setattr(pkgutil, "resolve_name", resolve)
        importlib.reload(torch_private)
        monkeypatch.setattr(ledger, "storage_key", torch_private.storage_key)
        return asked

    yield without
    monkeypatch.undo()
    importlib.reload(torch_private)


def measured() -> tuple[RegionRecord, tuple[str, ...]]:
    """A region that keeps 400 bytes and a gradient, after a graph that only C++ holds."""
    meter = CpuMeter()
    weight = torch.ones(50, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(weight.view(1, 50), torch.tensor([3]))
    gc.collect()
    with MemoryProbe(meter=meter).measure() as region:
        kept = torch.zeros(100)
        view = kept[:10]
        loss.backward(retain_graph=True)
        (torch.zeros(1000) + 1).sum()
    assert view._base is kept
    return region.record, meter.notes


def test_every_name_that_can_be_missed_is_tried(without) -> None:
    """The table above is complete."""
    assert sorted(without()) == sorted(TOLD)


def test_nothing_is_lost_with_this_torch() -> None:
    """Those supported have every name, and their reports say nothing of it."""
    assert torch_private.LOST == []


@pytest.mark.parametrize("path", TOLD)
def test_figures_stay_right_without(without, path: str) -> None:
    """To the byte, as with the name; and the meter's notes say what is lost, where it is."""
    expected, notes = measured()
    assert expected.retained_bytes == 400 + 200  # and the weight's gradient
    without(path)
    found, notes_without = measured()
    assert found.retained_bytes == expected.retained_bytes
    assert found.peak_bytes - found.start_bytes == expected.peak_bytes - expected.start_bytes
    told = notes_without[len(notes) :]
    if TOLD[path] is None:
        assert told == ()
    else:
        assert len(told) == 1
        assert TOLD[path] in told[0]


def test_figures_stay_right_without_any(without) -> None:
    """All at once."""
    without(*TOLD)
    assert measured()[0].retained_bytes == 600
    assert len(torch_private.LOST) == 10


@pytest.mark.parametrize("gradient", [torch.Tensor.backward, torch.autograd.grad])
def test_backward_passes_are_known_without_their_number(without, gradient) -> None:
    """By the frames of this thread: what the graph alone held is not blamed on the pass."""
    without("torch._C._current_graph_task_id")
    seen = []
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    loss.register_hook(lambda gradient: seen.append(torch_private.graph_task_id()))
    assert torch_private.graph_task_id() == -1
    gradient(loss, weight) if gradient is torch.autograd.grad else gradient(loss)
    assert seen == [0]
    assert torch_private.graph_task_id() == -1


def test_storages_are_told_apart_without_their_address(without) -> None:
    """By the public weak reference, which knows it as well."""
    tensor, other = torch.ones(2), torch.ones(2)
    known = torch_private.storage_key(tensor.untyped_storage())
    without("torch.UntypedStorage._cdata")
    assert torch_private.storage_key(tensor.untyped_storage()) == known
    assert torch_private.storage_key(other.untyped_storage()) != known


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "gone", [["torch._C._is_tracing"], ["torch._C._is_tracing", "torch.jit.is_tracing"]]
)
def test_tracing_is_known_by_its_public_name(without, gone: list[str]) -> None:
    """A torch without torch.jit never traces."""
    without(*gone)
    seen = []
    torch.jit.trace(lambda x: (seen.append(torch_private.is_tracing()), x + 1)[1], torch.ones(2))
    assert True in seen or len(gone) == 2
    assert not torch_private.is_tracing()


@pytest.mark.parametrize(("coalesced", "counted"), [(True, True), (False, False)])
def test_sparse_tensors_are_counted_by_public_methods(
    without, monkeypatch: pytest.MonkeyPatch, coalesced: bool, counted: bool
) -> None:
    """Which refuse those that are not coalesced."""
    from pytest_cka_memory.meters.ledger import live_objects

    without("torch.Tensor._values")
    monkeypatch.setitem(live_objects._SPARSE_PARTS, torch.sparse_coo, torch_private.SPARSE_PARTS)
    sparse = torch.ones(4).to_sparse()
    if not coalesced:
        sparse = torch.sparse_coo_tensor(
            sparse.indices(), sparse.values(), (4,), check_invariants=True
        )
    assert bool(live_objects.storages_of(sparse)) is counted


def test_regions_end_without_the_order_of_modes(without) -> None:
    """Their mode is the innermost, as ever where no test leaves one on."""
    without("torch.utils._python_dispatch._pop_mode")
    depth = torch._C._len_torch_dispatch_stack()
    with MemoryProbe(meter=CpuMeter()).measure() as region:
        kept = torch.zeros(25)
    assert torch._C._len_torch_dispatch_stack() == depth
    assert region.record.retained_bytes == kept.nbytes


def hint_of(make: Callable[[], object]) -> str | None:
    meter = CpuMeter()
    meter.start()
    mark = meter.mark()
    kept = make()
    found = holdings(meter.allocations_since(mark), {"kept": kept})
    meter.stop()
    return found[0].hint


def part_of_a_storage() -> torch.Tensor:
    return torch.empty(0).set_(torch.zeros(100).untyped_storage(), 0, (3,))


def test_a_part_is_called_a_view_where_that_cannot_be_told(without) -> None:
    """It keeps the rest alive like one."""
    assert hint_of(part_of_a_storage) is None
    without("torch.Tensor._is_view")
    assert "a view keeps all of its base alive" in hint_of(part_of_a_storage)


@pytest.mark.parametrize(
    ("register", "name"),
    [
        ("register_hook", "_backward_hooks"),
        ("register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks"),
    ],
)
def test_what_hooks_hold_is_found_without_their_name(without, register: str, name: str) -> None:
    """By the garbage collector, which does not say that it is a hook."""

    def hooked() -> torch.Tensor:
        tensor, held = torch.zeros(1, requires_grad=True), torch.zeros(100)
        getattr(tensor, register)(lambda gradient: held)
        return tensor

    assert "a hook was never removed" in hint_of(hooked)
    without(f"torch.Tensor.{name}")
    assert hint_of(hooked) is None


def saving() -> torch.Tensor:
    return torch.zeros(1, requires_grad=True).expand(100).exp().sum()


def test_what_a_graph_saves_has_no_holder_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is told to be held by C code, such as a graph."""
    assert "attached to its autograd graph" in hint_of(saving)
    monkeypatch.setattr(torch_private, "_RAW_SAVED", "_stowed_")
    assert "C code holds it, such as an autograd graph" in hint_of(saving)


def test_operators_without_a_schema_are_refused() -> None:
    """What they take could only be guessed."""
    with pytest.raises(DeviceError, match=r"what aten.f takes: .* have no _schema, as in 2.15"):
        torch_private.schema_of(type("Operator", (), {"__str__": lambda self: "aten.f"})())


@pytest.mark.parametrize("missing", ["_record_memory_history", "_dump_snapshot", "_snapshot"])
def test_an_allocator_without_history_has_none(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """All three are needed to record, read and write it."""
    names = {"_record_memory_history": print, "_dump_snapshot": print, "_snapshot": dict}
    cuda = SimpleNamespace(memory=SimpleNamespace(**names))
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    assert torch_private.allocator_history("cuda") == (print, print, dict)
    delattr(cuda.memory, missing)
    assert torch_private.allocator_history("cuda") is None


@pytest.mark.parametrize(("need", "name", "path"), NEEDED, ids=[name for _, name, _ in NEEDED])
def test_what_cannot_do_without_a_name_says_so(without, need: str, name: str, path: str) -> None:
    """With the name, the torch that has it and the one that is here."""
    without(path)
    with pytest.raises(DeviceError) as refused:
        getattr(torch_private, name)
    said = f"{need} needs a torch that has {path}, as 2.15 has; this is torch {torch.__version__}"
    assert str(refused.value) == said


def test_no_other_name_is_made_up() -> None:
    """A misspelt import fails as ever."""
    with pytest.raises(AttributeError, match="has no attribute 'FakeTensr'"):
        torch_private.FakeTensr  # noqa: B018


@pytest.mark.parametrize(
    ("device", "gone"),
    [
        ("cpu", "torch.utils._python_dispatch.TorchDispatchMode"),
        ("predict:cuda", "torch._C._get_privateuse1_backend_name"),
    ],
)
def test_a_probe_is_refused_where_torch_really_lacks_a_name(device: str, gone: str) -> None:
    """In a process of its own, where it was deleted before the first use."""
    owner, _, name = gone.rpartition(".")
    code = f"import torch; delattr({owner}, {name!r})\n"
    code += f"from pytest_cka_memory import MemoryProbe; MemoryProbe({device!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("pytest_cka_memory.errors.DeviceError: ")
    assert "needs a torch that has torch." in last
