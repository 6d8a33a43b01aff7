"""Without each private name of torch, figures stay right, or a note says what is lost."""

import gc
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import forked_processes
import pytest
import torch

from pytest_cka_memory import DeviceError, MemoryProbe, RegionRecord
from pytest_cka_memory.holders.references import tensor_rules
from pytest_cka_memory.holders.survivors import holdings
from pytest_cka_memory.meters import ledger, torch_keepers, torch_private
from pytest_cka_memory.meters.storage_meter import StorageMeter

EXPECTED_NOTES = {
    "torch._C.DisableTorchFunction": "the user has enabled also see the calls",
    "torch._C.DisableTorchFunctionSubclass": "of tensor subclasses also sees the calls",
    "torch.utils._mode_utils.no_dispatch": "may be counted twice",
    "torch._C._current_graph_task_id": "a backward pass on an accelerator",
    "torch._C._is_tracing": None,
    "torch.jit.is_tracing": None,
    "torch.UntypedStorage._cdata": None,
    "torch.Tensor._indices": "not coalesced are not counted",
    "torch.Tensor._values": "not coalesced are not counted",
    "torch.cpu._is_amx_tile_supported": None,
    "torch._C._is_cow_tensor": "reports copy lazy clones",
    "torch._C._functorch.is_functorch_wrapped_tensor": "do not name tensors that torch.func",
    "torch._C._functorch.get_unwrapped": None,
    "torch.utils._device._device_constructors": None,
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": None,
    "torch.UntypedStorage._share_fd_cpu_": "for worker processes) count as new",
    "torch.UntypedStorage._share_filename_cpu_": "for worker processes) count as new",
    "torch.Tensor._backward_hooks": "any dict that a tensor references for the dict of its",
    "torch.Tensor._post_accumulate_grad_hooks": (
        "any dict that a tensor references for the dict of its"
    ),
    "torch.Tensor._use_count": "if C++ uses a tensor too",
    "torch._C._storage_Use_Count": "if C++ uses a storage too",
    "torch._C._FunctionBase": "only by autograd Functions that are garbage",
    "torch._C._autograd.SavedTensor": None,
    "torch._C._autograd.SavedTensor.data": None,
    "torch._C.ScriptFunction": None,
    "torch._C.ScriptList": None,
    "torch._C.ScriptDict": None,
    "torch.autograd._get_sequence_nr": "a growing autograd graph without tensors is not named",
    "torch.autograd.graph._engine_run_backward": "no line of code for what a backward",
    "torch.jit._get_trace_graph": "torch.onnx may export wrong graphs",
}
"""Each name that may be missing -> part of the note about it; None if nothing is lost."""


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Return a function that reloads `torch_private` as if torch lacked the given names. It returns
    every name that was looked up.
    """
    find = pkgutil.resolve_name

    def without(*paths: str) -> list[str]:
        looked_up: list[str] = []

        def resolve(path: str) -> object:
            looked_up.append(path)
            if path in paths:
                raise AttributeError(path)
            return find(path)

        monkeypatch.setattr(pkgutil, "resolve_name", resolve)
        importlib.reload(torch_private)
        monkeypatch.setattr(ledger, "storage_key", torch_private.storage_key)
        return looked_up

    yield without
    monkeypatch.undo()
    importlib.reload(torch_private)


def measured() -> tuple[RegionRecord, tuple[str, ...]]:
    """Measure a region that keeps 400 bytes and a gradient, after a graph that only C++ holds.
    Return its record and the meter's notes.
    """
    meter = StorageMeter()
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


def test_every_optional_name_has_an_expected_note(without) -> None:
    """EXPECTED_NOTES has an entry for every optional private name that is looked up."""
    assert sorted(without()) == sorted(EXPECTED_NOTES)


def test_the_installed_torch_has_every_private_name() -> None:
    """Every supported torch version has all private names, so reports have no note about them."""
    assert torch_private.LOST == []


@pytest.fixture(scope="module")
def with_every_name() -> tuple[RegionRecord, tuple[str, ...]]:
    """The result of `measured` with every name, measured once because it takes a second."""
    return measured()


@pytest.mark.parametrize("path", EXPECTED_NOTES)
def test_figures_stay_right_without_one_private_name(with_every_name, without, path: str) -> None:
    """Without one private name the figures are equal to the byte, and a note says what is lost."""
    expected, notes = with_every_name
    assert expected.retained_bytes == 400 + 200  # and the weight's gradient
    without(path)
    found, notes_without = measured()
    assert found.retained_bytes == expected.retained_bytes
    assert found.peak_bytes - found.start_bytes == expected.peak_bytes - expected.start_bytes
    new_notes = notes_without[len(notes) :]
    if EXPECTED_NOTES[path] is None:
        assert new_notes == ()
    else:
        assert len(new_notes) == 1
        assert EXPECTED_NOTES[path] in new_notes[0]


def test_figures_stay_right_without_any_private_name(without) -> None:
    """The figures stay right even if all private names are missing at once."""
    without(*EXPECTED_NOTES)
    assert measured()[0].retained_bytes == 600
    assert len(torch_private.LOST) == 17


@pytest.mark.parametrize("gradient", [torch.Tensor.backward, torch.autograd.grad])
def test_backward_passes_are_detected_without_the_graph_task_id(without, gradient) -> None:
    """Without a graph's task id, backward passes are detected by this thread's frames, so that
    tensors that only the graph held are not attributed to them.
    """
    without("torch._C._current_graph_task_id")
    seen = []
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    loss.register_hook(lambda gradient: seen.append(torch_private.graph_task_id()))
    assert torch_private.graph_task_id() == -1
    gradient(loss, weight) if gradient is torch.autograd.grad else gradient(loss)
    assert seen == [0]
    assert torch_private.graph_task_id() == -1


def test_storages_are_distinguished_without_their_address(without) -> None:
    """Without the private address of storages, the public weak reference tells them apart."""
    tensor, other = torch.ones(2), torch.ones(2)
    known = torch_private.storage_key(tensor.untyped_storage())
    without("torch.UntypedStorage._cdata")
    assert torch_private.storage_key(tensor.untyped_storage()) == known
    assert torch_private.storage_key(other.untyped_storage()) != known


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "gone", [["torch._C._is_tracing"], ["torch._C._is_tracing", "torch.jit.is_tracing"]]
)
def test_tracing_is_detected_by_its_public_name(without, gone: list[str]) -> None:
    """Tracing is detected by a public name; a torch version without torch.jit never traces."""
    without(*gone)
    seen = []
    torch.jit.trace(lambda x: (seen.append(torch_private.is_tracing()), x + 1)[1], torch.ones(2))
    assert True in seen or len(gone) == 2
    assert not torch_private.is_tracing()


@pytest.mark.parametrize(("coalesced", "counted"), [(True, True), (False, False)])
def test_only_coalesced_sparse_tensors_are_counted_by_public_methods(
    without, monkeypatch: pytest.MonkeyPatch, coalesced: bool, counted: bool
) -> None:
    """By public methods only coalesced sparse tensors count, because others are refused."""
    from pytest_cka_memory.meters import objects

    without("torch.Tensor._values")
    monkeypatch.setitem(objects._SPARSE_PARTS, torch.sparse_coo, torch_private.SPARSE_PARTS)
    sparse = torch.ones(4).to_sparse()
    if not coalesced:
        sparse = torch.sparse_coo_tensor(
            sparse.indices(), sparse.values(), (4,), check_invariants=True
        )
    assert bool(objects.storages_of(sparse)) is counted


def hint_of(make: Callable[[], object]) -> str | None:
    meter = StorageMeter()
    meter.start()
    mark = meter.mark()
    kept = make()
    found = holdings(meter.allocations_since(mark), {"kept": kept})
    meter.stop()
    return found[0].hint


def test_a_search_copies_lazy_clones_only_without_is_lazy_clone(without) -> None:
    """Without is_lazy_clone a search copies lazy clones, because it reads their data's address."""
    clone = torch._lazy_clone(torch.zeros(100))
    rules = tensor_rules()(torch.Tensor)
    assert len(rules.keys(torch.zeros(100))) == 2
    assert len(rules.keys(clone)) == 1
    assert torch._C._is_cow_tensor(clone)
    without("torch._C._is_cow_tensor")
    assert len(tensor_rules()(torch.Tensor).keys(clone)) == 2
    assert not torch._C._is_cow_tensor(clone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("register", "name"),
    [
        ("register_hook", "_backward_hooks"),
        ("register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks"),
    ],
)
def test_a_hook_is_named_as_holder_also_without_its_attribute(
    without, register: str, name: str
) -> None:
    """Without torch's private attribute, a hook is found as holder
    by the dictionary that has it.
    """

    def hooked() -> torch.Tensor:
        tensor, held = torch.zeros(1, requires_grad=True), torch.zeros(100)
        getattr(tensor, register)(lambda gradient: held)
        return tensor

    assert "a hook was never removed" in hint_of(hooked)
    without(f"torch.Tensor.{name}")
    assert "a hook was never removed" in hint_of(hooked)


def saving() -> torch.Tensor:
    return torch.zeros(1, requires_grad=True).expand(100).exp().sum()


@pytest.mark.slow
def test_tensors_saved_by_a_graph_get_the_hint_of_c_code_without_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without private names for saved tensors, these get the hint about an autograd graph whose
    result no Python object has.
    """
    assert "keeps its autograd graph alive" in hint_of(saving)
    monkeypatch.setattr(torch_keepers, "_RAW_SAVED", "_stowed_")
    monkeypatch.setattr(torch_keepers, "_raw_saved", WeakKeyDictionary())
    assert "this may be an autograd graph of which no Python object has the result" in hint_of(
        saving
    )


def test_operators_without_a_schema_are_refused() -> None:
    """Without an operator's schema its arguments are not known, so the operator is refused."""
    with pytest.raises(DeviceError, match=r"arguments of aten.f: .* have no _schema; use another"):
        torch_private.schema_of(type("Operator", (), {"__str__": lambda self: "aten.f"})())


@pytest.mark.parametrize("missing", ["_record_memory_history", "_dump_snapshot", "_snapshot"])
def test_allocator_history_is_none_if_one_function_is_missing(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """All functions of the history are needed, so the history is None without one of them."""
    names = dict.fromkeys(("_record_memory_history", "_dump_snapshot", "_snapshot"), print)
    cuda = SimpleNamespace(memory=SimpleNamespace(**names))
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    assert torch_private.allocator_history("cuda") == (print, print, print)
    delattr(cuda.memory, missing)
    assert torch_private.allocator_history("cuda") is None


@pytest.mark.parametrize(("name", "path"), torch_private._NEEDED.items())
def test_a_missing_required_name_is_an_error(without, name: str, path: str) -> None:
    """The error for a required name has the name, a torch version
    with it, and the one installed.
    """
    without(path)
    with pytest.raises(DeviceError) as refused:
        getattr(torch_private, name)
    message = f"measuring needs {path}, which torch {torch.__version__} lacks; "
    assert str(refused.value) == f"{message}use another torch version, for example 2.15"


def test_a_misspelt_name_raises_attribute_error() -> None:
    """A misspelt name raises AttributeError, as in any other module."""
    with pytest.raises(AttributeError, match="has no attribute 'TorchDispatchMod'"):
        torch_private.TorchDispatchMod  # noqa: B018


def test_a_probe_is_refused_if_torch_lacks_a_required_name() -> None:
    """A probe is refused if torch lacks a required name.

    A separate process deletes the name before the first use.
    """
    code = "import torch; del torch.utils._python_dispatch.TorchDispatchMode\n"
    code += "from pytest_cka_memory import MemoryProbe; MemoryProbe('cpu')"
    run = forked_processes.run(
        ["python", "-c", code],
        environment={**os.environ, "CKA_MEMORY_NATIVE": "0"},  # the native counter needs no names
    )
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("pytest_cka_memory.errors.DeviceError: ")
    assert " needs torch." in last
