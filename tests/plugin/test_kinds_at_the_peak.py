"""Kinds of memory at the peak of programs, to the byte: an MLP, inference, a CNN, a leak."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

SOURCE = """
import json
import pytest
import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
PEAK = pytest.mark.max_level_mb("1 KB")
LEAKED = []


@pytest.fixture
def mlp(cka_memory):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(cka_memory.device)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, cka_memory.device)
    return model, optimizer


def train(model, optimizer, device):
    x = torch.randn(1024, 64).to(device)
    y = torch.zeros(1024, dtype=torch.long).to(device)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@PEAK
def test_mlp(mlp, cka_memory):
    train(*mlp, cka_memory.device)


@pytest.mark.max_peak_mb("1 KB")
def test_mlp_increase(mlp, cka_memory):
    train(*mlp, cka_memory.device)


@PEAK
def test_inference(mlp, cka_memory):
    model, _ = mlp
    x = torch.randn(1024, 64, device=cka_memory.device)
    with torch.no_grad():
        model(x)


@PEAK
def test_inference_on_a_long_expression(mlp, cka_memory):
    model, _ = mlp
    x = torch.zeros(1024, 64, dtype=torch.get_default_dtype(), device=cka_memory.device)
    with torch.no_grad():
        model(x)


@PEAK
def test_graph_without_backward(mlp, cka_memory):
    model, _ = mlp
    x = torch.randn(1024, 64, device=cka_memory.device)
    model(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, images):
        hidden = torch.relu(self.norm(self.first(images)))
        return self.head(hidden.mean((2, 3)))


@PEAK
def test_cnn(cka_memory):
    model = Net().to(cka_memory.device)
    images = torch.randn(16, 3, 32, 32).to(cka_memory.device)
    model(images).sum().backward()


def transformer(device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)


@pytest.fixture
def saved_bytes(cka_memory):
    # What one pass saves, counted by torch's hooks: without parameters and the tokens.
    model, tokens = transformer(cka_memory.device), torch.randn(8, 16, 32).to(cka_memory.device)
    others = {p.untyped_storage().data_ptr() for p in [*model.parameters(), tokens]}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(tokens)
        loss = out.square().mean()
    rounded = 1 if cka_memory.device.type == "cpu" else 512
    sizes = [-(-size // rounded) * rounded for key, size in saved.items() if key not in others]
    with open("saved.json", "w") as file:
        json.dump(sum(sizes), file)


@PEAK
def test_leak(saved_bytes, cka_memory):
    model = transformer(cka_memory.device)
    for _ in range(3):
        tokens = torch.randn(8, 16, 32).to(cka_memory.device)
        LEAKED.append(model(tokens).square().mean())
"""
MLP_PARAMETERS = (64 * 256, 256, 256 * 8, 8)
HIDDEN = 1024 * 256 * 4
X, Y = 1024 * 64 * 4, 1024 * 8
LAYER = (96 * 32, 96, 32 * 32, 32, 64 * 32, 64, 32 * 64, 32, 32, 32, 32, 32)
"""Elements of each parameter of an encoder layer of width 32 with a feed-forward part of 64."""


@pytest.fixture(params=["cpu", pytest.param("emulate:cuda", marks=pytest.mark.emulates)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def rounded(device: str) -> Callable[..., int]:
    """Return the bytes of blocks for float32 tensors of these numbers of elements."""
    unit = 4 if device == "cpu" else 512

    def sum_of(*elements: float) -> int:
        return sum(math.ceil(4 * count / unit) * unit for count in elements)

    return sum_of


@pytest.fixture
def programs(session, pytester, finished_sessions, device: str) -> Any:
    """Run all programs once on each device."""
    if device not in finished_sessions:
        run = session(SOURCE, f"--cka-memory-device={device}", forked=True)
        run.assert_outcomes(failed=7)
        finished_sessions[device] = run, int((pytester.path / "saved.json").read_text())
    return finished_sessions[device]


@pytest.fixture
def kinds_of(programs: Any) -> Callable[[str], Counter[str]]:
    """Return the bytes of each kind at the peak of a test, whose sum is the peak."""

    def kinds(test: str) -> Counter[str]:
        region = programs[0].region_of(test)
        found: Counter[str] = Counter()
        for holding in region["at_peak"]:
            found[holding["kind"]] += holding["bytes"]
        assert found.total() == region["peak_bytes"]
        return found

    return kinds


def test_training_step_of_an_mlp(kinds_of, rounded, device: str) -> None:
    """In the backward pass of an MLP every kind has the bytes that its tensors have."""
    found = kinds_of("test_mlp")
    parameters = rounded(*MLP_PARAMETERS)
    assert found["parameters"] == parameters
    assert found["optimiser"] == 2 * parameters + 4 * 4 * (device == "cpu")  # steps: on the host
    assert found["inputs"] == X + Y
    # On a card, workspaces decide in which layer the peak is; they depend on torch's version.
    if device == "cpu":
        assert found["activations"] == HIDDEN  # what ReLU has returned
        # The gradients of ReLU's result and argument, and the loss.
        assert found["temporaries"] == 2 * HIDDEN + 4
        assert found["gradients"] == rounded(256 * 8, 8, 1)  # of the last layer, and of the loss
    assert not found["other"]


@pytest.mark.parametrize("name", ["test_inference", "test_inference_on_a_long_expression"])
def test_inference_has_no_activations(kinds_of, rounded, device: str, name: str) -> None:
    """Without a graph nothing is kept for a backward pass: results are temporary.

    The second makes its input by an expression that messages show without its middle.
    """
    found = kinds_of(name)
    assert found["parameters"] == rounded(*MLP_PARAMETERS)
    assert found["inputs"] == X
    if device == "cpu":
        assert found["temporaries"] == 2 * HIDDEN
    assert not found["activations"] + found["gradients"] + found["other"]


def test_graph_that_is_dropped_has_activations(kinds_of, rounded, device: str) -> None:
    """What a graph has kept are activations, though it is freed without a backward pass."""
    found = kinds_of("test_graph_without_backward")
    assert found["activations"] == HIDDEN
    assert found["inputs"] == X


def test_step_of_a_cnn(kinds_of, rounded, device: str) -> None:
    """In a CNN the model is made in the region: its parameters and buffers count in it."""
    found = kinds_of("test_cnn")
    elements = (8 * 3 * 3 * 3, 8 * 4, 4, 8, 8, 8, 8, 2)  # convolution, head, norm and its count
    assert found["parameters"] == rounded(*elements)
    assert found["inputs"] == 16 * 3 * 32 * 32 * 4
    image = 16 * 8 * 32 * 32 * 4
    if device == "cpu":  # what the convolution has returned, and the statistics of the norm
        assert found["activations"] == image + 2 * 8 * 4
        assert found["gradients"] == rounded(8 * 4, 4, 8, 8, 1)
        assert found["temporaries"] == 3 * image + 4
    assert not found["other"] + found["optimiser"]


def test_leak_of_a_transformer(programs, kinds_of, rounded, device: str) -> None:
    """Graphs that a list of losses keeps alive are activations, as many as torch says it saves."""
    found = kinds_of("test_leak")
    saved_bytes = programs[1]
    if device == "cpu":
        assert found["activations"] == 3 * saved_bytes
    else:  # there the peak is in the third pass, which needs a workspace
        assert 2 * saved_bytes < found["activations"] <= 3 * saved_bytes
    assert found["parameters"] == 2 * rounded(*LAYER)
    assert found["inputs"] == 8 * 16 * 32 * 4
    assert not found["optimiser"] + found["gradients"]


def test_increase_counts_only_what_the_region_allocated(programs, device: str, rounded) -> None:
    """A limit on the increase names the kinds that were allocated in the region, and says so."""
    text = programs[0].text
    assert "at the peak, allocated in the region: " in text
    assert "at the peak, with memory from before the region: " in text
    region = programs[0].region_of("test_mlp_increase")
    inside = [h for h in region["at_peak"] if not h["before_region"]]
    assert sum(holding["bytes"] for holding in inside) == region["peak_increase_bytes"]
    kinds = {holding["kind"] for holding in inside}
    assert {"temporaries", "inputs", "gradients"} <= kinds
    assert not kinds & {"parameters", "optimiser", "other"}


@pytest.mark.native
def test_gradients_that_are_live_when_a_region_ends_are_counted(session) -> None:
    """Gradients with several elements, which have no truth value, can be live at the end."""
    source = """
        import torch

        WEIGHT = torch.ones(1000, requires_grad=True)

        def test_one():
            WEIGHT.sum().backward()
    """
    options = "--cka-memory-device=cpu", "--cka-memory-explain", "--cka-memory-report"
    run = session(source, *options, forked=True)
    run.assert_outcomes(passed=1)
    kinds = {holding["kind"]: holding["bytes"] for holding in run.regions[0]["at_peak"]}
    assert kinds["gradients"] == 4000 + 4  # of the weight and of its sum


@pytest.mark.native
def test_explain_prints_the_kinds_of_every_region(session) -> None:
    """``--cka-memory-explain`` prints the kinds of regions that keep their limits, too."""
    source = """
        import pytest
        import torch

        @pytest.mark.max_peak_mb(1)
        def test_one(cka_memory):
            with cka_memory.measure("made"):
                torch.ones(1000)
    """
    options = "--cka-memory-device=cpu", "--cka-memory-explain", "--cka-memory-report"
    run = session(source, *options, forked=True)
    run.assert_outcomes(passed=1)
    lines = [line.strip() for line in run.text.splitlines()]
    at = lines.index("test_it.py::test_one made")
    assert lines[at + 1].startswith("at the peak, with memory from before the region: ")
    assert {h["kind"] for h in run.region["at_peak"]} >= {"inputs"}
