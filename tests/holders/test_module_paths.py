"""Which layer allocated what is kept, or was live at the peak: the paths of modules."""

import gc
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest
import torch
from planted import KEEP, cleaned_up
from torch import nn

from pytest_cka_memory import MemoryProbe, RegionRecord
from pytest_cka_memory.holders.tensors import largest_modules, module_paths
from pytest_cka_memory.reports.failure import holding_lines


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield


class PeakExplainer:
    """Asks for what was live at the peak, as a limit on it does."""

    draws_paths = False

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        return ("peak_increase_bytes",)

    def named_values(self) -> Mapping[str, Any]:
        return {}


def network() -> nn.Sequential:
    encoder = nn.Module()
    first = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    encoder.layers = nn.Sequential(first, nn.Sequential(nn.Linear(8, 640), nn.Tanh()))
    encoder.forward = encoder.layers.forward  # type: ignore[method-assign]
    net = nn.Sequential()
    net.add_module("encoder", encoder)
    net.add_module("head", nn.Linear(640, 2))
    return net


def test_paths_lead_from_the_outermost_module() -> None:
    """The outermost module is named by its class; freed modules and other objects have no path."""
    net = network()
    identities = {id(module) for module in net.modules()}
    lone = nn.Linear(2, 2)
    gc.collect()
    assert module_paths({*identities, id(lone), id(identities)}) == {
        id(net): "Sequential",
        id(lone): "Linear",
        **{id(module): name for name, module in net.named_modules() if name},
    }
    assert module_paths(()) == {}


def test_a_module_that_contains_itself_has_a_path() -> None:
    """A module that contains itself, which torch allows, has a path."""
    module = nn.Sequential(nn.Sequential())
    module[0].outer = module
    assert module_paths({id(module[0])}) == {id(module[0]): "Sequential.0"}
    module[0].outer = None


def test_of_layers_that_differ_in_their_number_one_is_named() -> None:
    """Of layers that differ in their number only, the largest is
    named and the others are counted.
    """
    paths = {number: f"layers.{number}.linear1" for number in range(3)}
    paths |= {3: "head", 4: "stem.conv", 5: "layers.0.norm"}
    assert largest_modules([(0, 8), (0, 8)], paths) == "layers.0.linear1"
    assert largest_modules([(0, 8), (1, 8), (2, 4)], paths) == "layers.0.linear1 (and 2 like it)"
    assert (
        largest_modules([(0, 8), (1, 9), (3, 99)], paths)
        == "head and layers.1.linear1 (and 1 like it)"
    )
    sizes = [(0, 8), (1, 8), (3, 99), (4, 1), (5, 2), (7, 1000)]
    assert (
        largest_modules(sizes, paths) == "head, layers.0.linear1 (and 1 like it) and 2 more modules"
    )
    assert largest_modules([(7, 1000)], paths) is None


@pytest.mark.native
def test_failure_names_the_layer_beside_the_line_that_runs_the_network() -> None:
    """Beside the line that runs the network, the layer is named for
    what is kept and for the peak.
    """
    from pytest_cka_memory.meters.blocks.written import notes_modules

    if not notes_modules():
        pytest.skip("the layout of frames is not known in this version of Python")
    net, values = network(), torch.ones(100, 8)
    with MemoryProbe("cpu", explainer=PeakExplainer()).measure() as region:
        KEEP.append(net(values))
    largest = region.retained[0]
    # What the graph has saved of two layers is one group.
    assert largest.module == "encoder.layers.1.1 (and 1 like it)"
    lines = [line.strip() for line in holding_lines(largest)]
    assert lines.index("in encoder.layers.1.1 (and 1 like it)") > 0
    assert "head" in {holding.module for holding in region.retained}
    at_peak = [holding for holding in region.record.at_peak if not holding.before_region]
    assert [(holding.kind, holding.module) for holding in at_peak] == [
        ("activations", "encoder.layers.1.1 (and 1 like it)"),
        ("temporaries", "encoder.layers.1.0"),
    ]
