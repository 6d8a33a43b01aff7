"""The advice for each kind of holder, and that it is not given for anything else."""

import functools
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from planted import KEEP, cleaned_up
from torch import nn

from pytest_cka_memory import Holding, MemoryProbe, Region, RegionRecord
from pytest_cka_memory.core.places import OWN_FOLDERS
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.holders import Reference, Root
from pytest_cka_memory.holders import hints as keepers
from pytest_cka_memory.holders.hints import keeper_of
from pytest_cka_memory.limits import flat_per_batch
from pytest_cka_memory.meters.selection import meter_for
from pytest_cka_memory.reports import failure

WEIGHT = nn.Parameter(torch.ones(250))
LOCAL = (
    "`{0}` is a local variable of {1}; write `del {0}` in the block, or move the body of "
    "the block into a function"
)

GROWS = "`{}` grows in every batch; empty it, or limit its length"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield


class Namespace:
    """An object of the user's, with any attributes."""


class CachedDataset:
    """A data set that keeps every item."""

    def __init__(self) -> None:
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.cache.setdefault(index, torch.ones(250) * index)


def hints(region: Region) -> dict[str, str | None]:
    """Return the hint of each group, by the start of the holder's expression."""
    return {re.split(r" in |\(", str(found.held_by))[0]: found.hint for found in region.retained}


@pytest.mark.native
def test_locals_of_a_test_are_to_be_deleted() -> None:
    """A tensor that a local variable of the test keeps has the advice to delete the variable."""
    function = "test_locals_of_a_test_are_to_be_deleted"
    with MemoryProbe("cpu").measure() as region:
        ids = torch.ones(250)
        output = (WEIGHT * 2).exp()
        losses = [torch.ones(300)]
    found = hints(region)
    assert found["ids"] == LOCAL.format("ids", function)
    assert found["output"] == LOCAL.format("output", function)
    assert found["losses[0]"] == (
        f"`losses` is a local variable of {function}; if the measured block creates it, write `del "
        "losses` at the end of the block; otherwise do not store the tensor in it"
    )
    graph = [path for path in found if path.startswith("output.grad_fn")]
    assert {found[path] for path in graph} == {found["output"]}
    assert len(found) == 3 + len(graph)
    del ids, output, losses


class GrowthExplainer:
    """Asks for what is kept in several batches, as a limit on growth does."""

    draws_paths = False

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        return ("growth_bytes_per_batch",)

    def named_values(self) -> Mapping[str, Any]:
        return {}


def trained(_: int) -> None:
    """Keep a loss after its backward pass."""
    loss = WEIGHT.exp().sum()
    loss.backward()
    WEIGHT.grad = None
    KEEP.append(loss)


def growth(step: Any) -> tuple[tuple[Holding, ...], str]:
    """Return what `step`, called in each of 8 batches, keeps, and the text of the failure."""
    with MemoryProbe("cpu", explainer=GrowthExplainer()).measure() as region:
        for number in range(8):
            step(number)
            region.batch_done(4)
    result = judge("t.py::test", region.record, [flat_per_batch()])
    text = " ".join(failure.render([result], meter_for("cpu").facts()).split())
    return region.record.grown, text


@pytest.mark.slow
def test_losses_are_told_from_other_tensors_that_grow() -> None:
    """Only tensors with one element can be losses; for others that grow, the list is named."""
    dataset = KEEP.append(CachedDataset()) or KEEP[0]
    grown, text = growth(dataset.__getitem__)
    assert [holding.hint for holding in grown] == [GROWS.format("dataset.cache")]
    assert ".cache[0]" in text
    grown, _ = growth(lambda _: KEEP.append((WEIGHT * 2).detach().sum()))
    number = "keep the number, tensor.item(), instead of the tensor, which has one element"
    assert grown[0].hint == number
    grown, _ = growth(lambda _: KEEP.append(WEIGHT.sum()))
    assert grown[0].hint == (
        "keep loss.item() instead of the tensor, which keeps its autograd graph alive"
    )
    grown, text = growth(lambda _: KEEP.append(WEIGHT.exp().sum()))
    loss = "keep loss.item() instead of the tensor, which keeps its autograd graph alive"
    # A backward pass would have released what the graph has saved for it.
    without_graph = f"{loss}; if no backward pass is needed, also compute it in torch.no_grad()"
    assert [holding.hint for holding in grown] == [without_graph, loss]
    assert text.count("what to do: keep loss.item()") == 1
    grown, text = growth(trained)
    assert {holding.hint for holding in grown} == {loss}
    grown, text = growth(lambda _: KEEP.append(WEIGHT * 2))
    assert grown[0].hint == GROWS.format("planted.KEEP")  # its detach() would keep the same bytes
    grown, _ = growth(lambda _: KEEP.append(WEIGHT.exp() * 2))
    (hint,) = {str(holding.hint) for holding in grown if ".grad_fn" in str(holding.held_by)}
    assert hint.startswith(
        f"{GROWS.format('planted.KEEP')}; each of these tensors is saved for the backward pass of "
        "a tensor that is kept; instead of that tensor, keep a number"
    )
    assert "loss.item()" not in text


@pytest.mark.parametrize("way", ["attached", "detached", "cloned", "number"])
def test_only_the_number_of_a_loss_is_advised_because_detached_losses_still_grow(
    way: str,
) -> None:
    """A detached `mse_loss` keeps the unreduced storage and a clone
    one element: only item() helps.
    """
    convert: dict[str, Callable[[torch.Tensor], Any]] = {
        "attached": lambda loss: loss,
        "detached": lambda loss: loss.detach(),
        "cloned": lambda loss: loss.detach().clone(),
        "number": lambda loss: loss.item(),
    }
    target = torch.zeros(250)
    grown, text = growth(
        lambda _: KEEP.append(convert[way](nn.functional.mse_loss(WEIGHT, target)))
    )
    if way == "number":
        assert (grown, text) == ((), "")
        return
    assert grown
    for hint in (str(holding.hint) for holding in grown):
        assert "item()" in hint
        assert not re.search(r"detach\(\)|clone\(\)|limit its length", hint)
        assert ("larger storage" in hint) is (way == "detached")


def logger() -> Any:
    """Return a function that keeps what it is given in a list that only it references."""
    history: list[torch.Tensor] = []

    def log(value: torch.Tensor) -> None:
        history.append(value)

    return log


@pytest.mark.parametrize("detached", [False, True], ids=["attached", "detached"])
def test_list_of_a_closure_that_grows_is_named_by_its_variable(detached: bool) -> None:
    """A list in a closure that grows is named by its variable, whether its tensors are detached or
    not.
    """
    log = logger()
    KEEP.append(log)
    grown, _ = growth(lambda _: log((WEIGHT * 2).detach() if detached else WEIGHT * 2))
    assert str(grown[0].hint).startswith("`history`, a variable of the closure `")
    assert "grows in every batch; empty it, or limit its length" in str(grown[0].hint)
    assert "detach()" not in str(grown[0].hint)  # it would keep the same bytes


class Attention(nn.Module):
    """A module that keeps a part or all of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[torch.Tensor] = []

    def forward(self, key: torch.Tensor) -> None:
        self.keys.append(key)


@pytest.mark.slow
def test_list_of_a_module_that_grows_is_named_and_not_the_module() -> None:
    """If a list in a module grows, the list is named; deleting the module's variable would not
    help.
    """
    model = Attention()
    grown, _ = growth(lambda _: model((WEIGHT * 2).detach()[:5]))
    assert str(grown[0].hint).startswith(
        f"{GROWS.format('model.keys')}; each tensor uses only part of"
    )
    grown, _ = growth(lambda _: model((WEIGHT * 2).detach()))
    assert grown[0].hint == GROWS.format("model.keys")
    with MemoryProbe("cpu").measure() as region:
        for _ in range(3):
            model((WEIGHT * 2).detach())
    (holding,) = region.retained
    assert (
        holding.hint
        == "`model.keys` has 3 entries that keep these tensors alive; empty it in the block"
    )


def optimizer_that_has_stepped() -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(250))
    weight.sum().backward()
    optimizer = torch.optim.Adam([weight])
    optimizer.step()
    return optimizer


@pytest.mark.slow
def test_list_that_keeps_old_optimizers_is_named() -> None:
    """A list of old optimizers is named, because neither an early step nor zero_grad() helps."""
    grown, _ = growth(lambda _: KEEP.append(optimizer_that_has_stepped()))
    assert {holding.hint for holding in grown} == {
        "`planted.KEEP` keeps old optimizers, each with its state and gradients; remove "
        "them from `planted.KEEP`"
    }


def test_optimizers_of_a_list_that_may_be_new_or_not_have_both_remedies() -> None:
    """Outside of batches, a list's optimizers may be new or
    old, so the advice has both remedies.
    """
    with MemoryProbe("cpu").measure() as region:
        KEEP.extend((optimizer_that_has_stepped(), optimizer_that_has_stepped()))
    assert (
        "`planted.KEEP` keeps 2 optimizers; if the measured block creates them, remove them from "
        in str(region.retained[0].hint)
    )
    optimizer = torch.optim.Adam([WEIGHT])
    WEIGHT.grad = torch.ones(250)
    with MemoryProbe("cpu").measure() as region:
        optimizer.step()
    WEIGHT.grad = None
    assert region.retained[0].hint == (
        "take one step of the optimizer before measuring, because it allocates its state "
        "in its first step; if the measured block makes the optimizer, delete it there"
    )


def test_a_local_that_sums_losses_is_told_to_keep_their_numbers() -> None:
    """A local that sums losses should keep numbers; ``del total`` would not stop its growth."""
    total: Any = 0.0
    with MemoryProbe("cpu", explainer=GrowthExplainer()).measure() as region:
        for _ in range(8):
            total = total + WEIGHT.exp().sum()
            region.batch_done(4)
    (hint,) = {holding.hint for holding in region.record.grown}
    assert hint is not None
    assert hint.startswith("the autograd graph of `total` reaches back through several batches")
    assert "total + WEIGHT.exp().sum()` at " in hint  # in Python 3.10 the whole line
    assert "add loss.item() to the sum instead of the loss; if backward() is called on" in hint
    del total


def square_sum(model: nn.Module, loader: Any) -> torch.Tensor:
    return sum(model(batch).square().mean() for batch in loader)  # type: ignore[return-value]


def backward_each(model: nn.Module, loader: Any) -> torch.Tensor:
    losses = []
    for batch in loader:
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.item())
    return torch.tensor(sum(losses))


def recurrence(model: nn.Module, loader: Any) -> torch.Tensor:
    return functools.reduce(lambda state, batch: model(batch) * state, loader)


def detached_recurrence(model: nn.Module, loader: Any) -> torch.Tensor:
    return functools.reduce(lambda state, batch: model(batch) * state.detach(), loader)


class LateExplainer(GrowthExplainer):
    """Asks for growth after six batches."""

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        return super().figures_to_explain(record) if record.batches >= 6 else ()


SUMS = {
    "sum": (square_sum, backward_each, "if backward() is called on the sum, call it on the loss"),
    "reduce": (
        recurrence,
        detached_recurrence,
        "compute each new value from a detach() of the previous one",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SUMS)
def test_graph_that_only_c_code_references_is_named_by_the_line_that_makes_it(kind: str) -> None:
    """While ``sum`` runs, its value has no name; the graph of all batches is one group per line.

    The advice is followed literally, and then nothing grows.
    """
    loop, repaired, advice = SUMS[kind]
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))  # none of which saves its result
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with MemoryProbe("cpu", explainer=LateExplainer()).measure() as region:
        loop(model, region.batches([torch.ones(64, 8) for _ in range(8)]))
    largest = region.record.grown[0]
    assert str(largest.held_by).startswith("C or C++ code, which references ")
    assert (largest.batches or 0) > 3
    hint = str(largest.hint)
    assert hint.startswith("C or C++ code, such as a running sum(), references a tensor, made by `")
    assert "test_hints.py:" in hint
    assert "reaches back through several batches" in hint
    assert advice in hint
    with MemoryProbe("cpu").measure() as region:
        repaired(model, region.batches([torch.ones(64, 8) for _ in range(8)]))
    assert region.growth_bytes_per_batch == 0


def test_a_part_of_a_larger_storage_wants_a_clone() -> None:
    """A view of part of a storage has the advice to clone it; a tensor with all of it has none."""
    with MemoryProbe("cpu").measure() as region:
        KEEP.append(torch.ones(250)[:5])
        KEEP.append((torch.ones(260),))
        KEEP.append(nn.BatchNorm1d(1))
    found = hints(region)
    assert "keep a clone() instead of the tensor" in str(found.pop("planted.KEEP[0]"))
    assert "planted.KEEP[1][0]" in found
    assert "planted.KEEP[2].num_batches_tracked" in found
    assert set(found.values()) == {None}


@pytest.mark.slow
def test_attributes_that_are_only_named_like_those_of_torch_have_no_hint() -> None:
    """A user's attribute such as ``grad`` or ``_my_hooks`` gets no advice meant for torch's own."""
    stats, module, values = Namespace(), nn.Module(), torch.ones(1)
    KEEP.extend([stats, module])
    with MemoryProbe("cpu").measure() as region:
        stats.grad = torch.ones(250)  # type: ignore[attr-defined]
        stats._saved_outputs = [torch.ones(251)]  # type: ignore[attr-defined]
        stats.state = {stats: torch.ones(252)}  # type: ignore[attr-defined]
        stats._forward_hooks = {1: torch.ones(253)}  # type: ignore[attr-defined]
        module._my_hooks = {1: torch.ones(254)}  # type: ignore[assignment]
        values._my_hooks = {1: torch.ones(255)}  # type: ignore[attr-defined]
    assert len(region.retained) == 6
    hints = [str(holding.hint) for holding in region.retained]
    assert {hint.split()[0].strip("`") for hint in hints} == {"stats", "module", "values"}
    assert all(hint.endswith("otherwise do not store the tensor in it") for hint in hints), hints


def raised_with(values: torch.Tensor) -> ValueError:
    try:
        raise ValueError(len(values))
    except ValueError as error:
        return error


def test_exception_kept_by_a_plugin_names_the_attribute_of_the_test(
    request: pytest.FixtureRequest,
) -> None:
    """If a plugin keeps an exception on a test item, the advice names the item's attribute."""
    with MemoryProbe("cpu").measure() as region:
        request.node._kept_by_a_plugin = raised_with(torch.ones(250))
    (holding,) = region.retained
    assert holding.hint is not None
    assert holding.hint.startswith(
        "a plugin that sets the attribute `_kept_by_a_plugin` on the test item stores an "
        "exception, which keeps its frames and their variables alive; run without it (-p no:NAME "
        "for a plugin of"
    )
    del request.node._kept_by_a_plugin


@pytest.mark.slow
def test_exceptions_that_the_user_stores_are_told_from_those_of_the_packages_they_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exception that the user stores is the user's, though its frames have this package's
    loader.
    """
    monkeypatch.setattr(keepers, "is_of_package", lambda file: file.startswith(OWN_FOLDERS))

    def fit(loader: Any) -> None:
        for batch in loader:
            if batch.sum() < 0:
                raise ValueError("negative")
        raise ValueError("the end")

    with MemoryProbe("cpu").measure() as region:
        try:
            fit(region.batches([torch.ones(250) for _ in range(3)]))
        except ValueError as error:
            KEEP.append(error)
    held = " ".join(str(holding.held_by) for holding in region.retained)
    assert "f_locals['loader']" in held
    assert {holding.hint for holding in region.retained} == {
        (
            "store the text of the exception instead of the exception, which keeps its frames "
            "and their variables alive"
        )
    }


def test_generator_of_this_package_is_not_to_be_closed() -> None:
    """The generator that wraps the user's loader is not visible to users, so no hint names it."""
    with MemoryProbe("cpu").measure() as region:
        batches = iter(region.batches([torch.ones(250) for _ in range(3)]))
        KEEP.append(batches)
        next(batches)
    assert region.retained_bytes == 3000
    assert not any("generator" in str(holding.hint) for holding in region.retained)
    del batches


@pytest.mark.parametrize(
    ("prefix", "value", "keeper"),
    [
        pytest.param("stores_errors.", {}, "the package stores_errors", id="global"),
        pytest.param("planted.", {}, None, id="own-module"),
        pytest.param("_pytest.runner.", {}, None, id="pytest-itself"),
        pytest.param("torch.", ModuleType("x"), None, id="torch"),
    ],
)
def test_keeper_of_an_exception_is_the_package_that_stores_it(
    monkeypatch: pytest.MonkeyPatch, prefix: str, value: Any, keeper: str | None
) -> None:
    """A stored exception belongs to the package where its path begins, unless it is the user's."""
    package = ModuleType("stores_errors")
    package.__file__ = str(Path("lib", "site-packages", "stores_errors.py"))
    monkeypatch.setitem(sys.modules, "stores_errors", package)
    path = [Reference(value, None, Root(prefix, "", {"STORE": value}, True), "STORE")]
    assert keeper_of(path) == keeper


def test_parameters_of_a_module_are_not_to_be_emptied() -> None:
    """The dict in which a module has its parameters is a part of the module, and no container."""
    with MemoryProbe("cpu").measure() as region:
        KEEP.append(nn.ParameterList([nn.Parameter(torch.ones(10)) for _ in range(5)]))
    (group,) = region.retained
    assert group.count == 5
    assert group.hint is None
