"""A tensor that the ledger cannot read completely is counted as far as possible, and named."""

from typing import Any

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.core.report import ReportBuilder
from pytest_cka_memory.meters import objects
from pytest_cka_memory.meters.accelerator.meter import AcceleratorMeter
from pytest_cka_memory.meters.storage_meter import StorageMeter


class Refusing(torch.Tensor):
    """A wrapper subclass whose ``__tensor_flatten__`` raises."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Refusing":
        made: Refusing = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        made.values = values
        return made

    def __tensor_flatten__(self) -> Any:
        raise ValueError("not today")

    @classmethod
    def __tensor_unflatten__(cls, *_: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


@pytest.fixture
def no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the notes of earlier tests."""
    monkeypatch.setattr(objects, "_incomplete", {})


@pytest.fixture
def probe(no_notes: None) -> MemoryProbe:
    """A probe with a ledger, without the notes of earlier tests."""
    return MemoryProbe(meter=StorageMeter())


def test_tensors_in_its_attributes_are_counted(probe: MemoryProbe) -> None:
    """Tensors in the attributes of an unreadable one are counted,
    also if only it refers to them.
    """
    with probe.measure() as region:
        kept = Refusing(torch.ones(1000))
    assert region.retained_bytes == 4000
    del kept


def test_its_type_is_named_in_the_notes(probe: MemoryProbe) -> None:
    """The notes name the type of an unreadable tensor, and say what is counted and why."""
    with probe.measure():
        kept = Refusing(torch.ones(10))
    notes = probe.meter.facts()["notes"]
    expected = "Refusing: only tensors in its attributes are counted, because its "
    assert [expected in note for note in notes].count(True) == 1
    assert "__tensor_flatten__ raised ValueError" in notes[-1]
    del kept


@pytest.mark.usefixtures("no_notes")
def test_its_type_is_named_in_the_notes_of_an_accelerator(gpu: AcceleratorMeter) -> None:
    """On an accelerator without counters, tensors are counted, and notes name unreadable types."""
    assert gpu.facts()["notes"] == list(gpu.notes)
    with MemoryProbe(meter=gpu).measure():
        kept = Refusing(torch.ones(10))
    (added,) = gpu.facts()["notes"][len(gpu.notes) :]
    assert "Refusing: only tensors in its attributes are counted" in added
    del kept


def test_opaque_tensor_is_named_in_the_notes(probe: MemoryProbe) -> None:
    """An opaque tensor has no storage that could be counted, so that the notes name its type."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("requires a torch build with oneDNN")
    with probe.measure():
        kept = torch.ones(10).to_mkldnn()
    assert probe.meter.facts()["notes"][-1] == "not counted: tensors with layout torch._mkldnn"
    del kept


def test_ordinary_tensors_add_no_note(probe: MemoryProbe) -> None:
    """Ordinary tensors of any layout that is counted add no note."""
    with probe.measure():
        sparse = torch.eye(4).to_sparse()
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        compressed = torch.eye(4).to_sparse_csr()
        strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert objects.notes() == ()
    del sparse, nested, compressed, strided


def test_report_has_the_notes_of_every_test() -> None:
    """A report has the notes of every test, since a later test or worker may cause one."""
    builder = ReportBuilder()
    facts = {"device": "cpu", "device_name": "x", "meter": "m", "notes": ["a"]}
    for worker, notes in (("gw0", ["a"]), ("gw1", ["a", "b"]), ("gw0", ["a", "c"])):
        payload: Any = {
            "facts": {**facts, "notes": notes}, "regions": [], "unmeasured": [], "narrowed": False
        }  # fmt: skip
        builder.add("t.py::t", worker, "passed", payload)
    assert builder.report().session["notes"] == ["a", "b", "c"]
    other = ReportBuilder()
    other.add("t.py::t", "rank 1", "passed", {**payload, "facts": {**facts, "notes": ["d"]}})
    builder.absorb(other.to_dict())
    assert builder.report().session["notes"] == ["a", "b", "c", "d"]
