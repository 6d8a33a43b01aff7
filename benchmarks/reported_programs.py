"""Twelve leaks that users have reported in public, each as a small program.

    pytest benchmarks/reported_programs.py

Every test runs its program as it was reported, which breaks its limit, and once for each thing that
the message advises. ``reported_leaks.py`` makes the table. No program copies a report's code.
"""

import functools
import warnings
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCHES = 8
HUB = "https://github.com"


class Report(NamedTuple):
    """Where a leak was reported, what happens there, and what the message's advice was taken as."""

    url: str
    mechanism: str
    ways: dict[str, str]
    """For each thing that the advice says to do, or offers: the edit of the program."""


REPORTS: dict[str, Report] = {}


def reported(path: str, mechanism: str, **ways: str) -> Any:
    """Add a test to the table, and let it run as reported and in each of these ways."""

    def add(test: Any) -> Any:
        REPORTS[test.__name__] = Report(f"{HUB}/{path}", mechanism, ways)
        return pytest.mark.parametrize("way", ["reported", *ways])(test)

    return add


def batches(device: Any, *shape: int) -> list[torch.Tensor]:
    return [torch.ones(shape, device=device) for _ in range(BATCHES)]


def network(device: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


class AverageMeter:
    """A mean that is updated with each batch."""

    def __init__(self) -> None:
        self.sum: Any = 0.0
        self.count = 0

    def update(self, value: Any, count: int) -> None:
        self.sum += value * count
        self.count += count


@pytest.mark.flat_per_batch
@reported(
    "pytorch/pytorch/issues/6925",
    "a meter adds the loss of each validation batch, with its graph",
    item="losses.update(loss.item(), n)",
)
def test_meter_of_losses(cka_memory: Any, way: str) -> None:
    model, losses = network(cka_memory.device), AverageMeter()
    with cka_memory.measure("validate") as region:
        for images in region.batches(batches(cka_memory.device, 16, 32)):
            loss = model(images).square().mean()
            losses.update(loss.item() if way == "item" else loss, len(images))


@pytest.mark.flat_per_batch
@reported(
    "IBM/mi-prometheus/issues/111",
    "statistics keep the loss tensor of each episode",
    item='statistics["loss"].append(loss.item())',
)
def test_statistics_of_losses(cka_memory: Any, way: str) -> None:
    model = network(cka_memory.device)
    statistics: dict[str, list[Any]] = {"loss": []}
    with cka_memory.measure("episodes") as region:
        for inputs in region.batches(batches(cka_memory.device, 16, 32)):
            model.zero_grad(set_to_none=False)
            loss = model(inputs).square().mean()
            loss.backward()
            statistics["loss"].append(loss.item() if way == "item" else loss)


@pytest.mark.flat_per_batch
@reported(
    "TorchSim/torch-sim/pull/590",
    "finished states keep the energy that a model has computed, with the graph of the model",
    empty="finished.clear() after each batch",
    detach="SimpleNamespace(energy=energy.detach())",
    no_grad="the model runs in torch.no_grad()",
)
def test_finished_states(cka_memory: Any, way: str) -> None:
    model = network(cka_memory.device)
    finished: list[Any] = []
    with cka_memory.measure("optimize") as region:
        for positions in region.batches(batches(cka_memory.device, 16, 32)):
            with torch.set_grad_enabled(way != "no_grad"):
                energy = model(positions)
            energy = energy.detach() if way == "detach" else energy
            finished.append(SimpleNamespace(energy=energy))
            if way == "empty":
                finished.clear()


@pytest.mark.flat_per_batch
@reported(
    "Lightning-AI/torchmetrics/issues/3294",
    "a metric whose states are lists keeps the predictions of each batch",
    empty="metric.reset() after each batch",
)
def test_metric_with_lists(cka_memory: Any, way: str) -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    metric = classification.MultilabelAveragePrecision(num_labels=4).to(cka_memory.device)
    target = torch.ones(32, 4, dtype=torch.long, device=cka_memory.device)
    with cka_memory.measure("metric") as region:
        for _ in region.batches(range(BATCHES)):
            metric.update(torch.rand(32, 4, device=cka_memory.device), target)
            if way == "empty":
                metric.reset()


class Callback:
    """Keeps what a model predicts, and the inputs of it."""

    def __init__(self) -> None:
        self.predictions: list[Any] = []
        self.inputs: list[Any] = []

    def batch_ended(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        self.predictions.append(outputs)
        self.inputs.append(inputs)


@pytest.mark.flat_per_batch
@reported(
    "sktime/pytorch-forecasting/pull/2086",
    "a callback keeps the predictions and inputs of the whole epoch",
    empty="both lists are emptied after each batch",
    bound="both lists keep the last batch only",
)
def test_callback_that_predicts(cka_memory: Any, way: str) -> None:
    model, callback = network(cka_memory.device), Callback()
    with cka_memory.measure("predict") as region, torch.no_grad():
        for number in region.batches(range(BATCHES)):
            inputs = torch.full((16, 32), float(number), device=cka_memory.device)
            callback.batch_ended(inputs, model(inputs))
            if way != "reported":
                kept = 0 if way == "empty" else 1
                del callback.predictions[: len(callback.predictions) - kept]
                del callback.inputs[: len(callback.inputs) - kept]


class RunningMean(nn.Module):
    """Normalizes by a mean that is a buffer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.register_buffer("mean", torch.zeros(32))
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        if self.way == "detach":
            self.mean = self.mean.detach()
        with torch.set_grad_enabled(self.way != "no_grad"):
            self.mean = 0.9 * self.mean + 0.1 * x.exp().mean(0)
        return x - self.mean


@pytest.mark.flat_per_batch
@reported(
    "pytorch/pytorch/issues/20275",
    "a custom batch norm updates its running mean with the graph of each batch",
    detach="self.mean = self.mean.detach() before each update",
    no_grad="the mean is computed in torch.no_grad()",
)
def test_running_mean(cka_memory: Any, way: str) -> None:
    norm = RunningMean(way).to(cka_memory.device)
    with cka_memory.measure("train") as region:
        for inputs in region.batches(batches(cka_memory.device, 16, 32)):
            norm(inputs)


class Sampled(nn.Module):
    """A layer whose hook keeps activations for the gradients of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 8)
        self.activations: list[Any] = []
        self.layer.register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.activations.append(inputs[0].clone())


@pytest.mark.flat_per_batch
@reported(
    "meta-pytorch/opacus/issues/176",
    "a forward hook keeps activations that only a backward pass takes, also in torch.no_grad()",
    empty="model.activations.clear() after each batch",
)
def test_activations_of_samples(cka_memory: Any, way: str) -> None:
    model = Sampled().to(cka_memory.device)
    with cka_memory.measure("evaluate") as region, torch.no_grad():
        for inputs in region.batches(batches(cka_memory.device, 16, 32)):
            model.layer(inputs)
            if way == "empty":
                model.activations.clear()


class Hooked(nn.Module):
    """Its forward hook refers to the module itself."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        if way == "argument":
            self.register_forward_hook(lambda module, *_: module.layer)
        elif way == "weak":
            this = weakref.ref(self)
            self.register_forward_hook(lambda *_: this())
        else:
            self.register_forward_hook(lambda *_: self.layer)


@pytest.mark.no_cycles
@reported(
    "pytorch/pytorch/issues/46386",
    "a hook refers to its own module, which only the garbage collector frees",
    argument="the hook takes the module from its first argument",
    weak="the hook has a weakref.ref to the module",
)
def test_hook_with_its_module(cka_memory: Any, way: str) -> None:
    with cka_memory.measure("models"):
        for _ in range(3):
            Hooked(way).to(cka_memory.device)


@pytest.mark.zero_retention
@reported(
    "pytorch/pytorch/issues/7343",
    "backward(create_graph=True): the gradient's graph and its tensor keep each other alive",
    none="x.grad = None after its last use",
    grad="torch.autograd.grad(..., create_graph=True)",
)
def test_gradient_with_its_graph(cka_memory: Any, way: str) -> None:
    with cka_memory.measure("second order"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.ones(256, device=cka_memory.device, requires_grad=True)
        y = x.tanh()
        if way == "grad":
            torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        else:
            y.backward(torch.ones_like(y), create_graph=True)
        if way == "none":
            x.grad = None
        del x, y


@pytest.mark.zero_retention
@reported(
    "pytorch/pytorch/issues/10348",
    "exceptions of a training loop are kept, with their tracebacks",
    text="failures.append(str(error))",
)
def test_exceptions_of_training(cka_memory: Any, way: str) -> None:
    failures: list[Any] = []

    def train(model: nn.Module) -> None:
        result = model(torch.ones(16, 32, device=cka_memory.device))
        raise ValueError(f"{len(result)} results")

    with cka_memory.measure("search"):
        for _ in range(3):
            try:
                train(nn.Linear(32, 8).to(cka_memory.device))
            except ValueError as error:
                failures.append(str(error) if way == "text" else error)


@pytest.mark.zero_retention
@reported(
    "pytorch/pytorch/issues/115255",
    "a hook that packs saved tensors returns the tensor itself, which references its own graph",
    detach="the pack hook returns x.detach()",
    copy="the pack hook returns x.clone()",
)
def test_hooks_of_saved_tensors(cka_memory: Any, way: str) -> None:
    packs = {"detach": torch.Tensor.detach, "copy": torch.clone}
    pack = packs.get(way, lambda x: x)

    def block(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return x.exp()

    with cka_memory.measure("forward"):
        x = torch.ones(256, device=cka_memory.device, requires_grad=True)
        checkpoint(block, x, use_reentrant=False).sum()
        block(x).sum()
        del x


class Kernel(nn.Module):
    """Its method has a cache, whose keys are the modules."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, device=device))

    @functools.lru_cache  # noqa: B019 - that is the leak
    def squared(self, numbers: bool) -> Any:
        squared = self.scale.detach().square()
        return squared.sum().item() if numbers else squared


@pytest.mark.zero_retention
@reported(
    "meta-pytorch/botorch/pull/1650",
    "functools.lru_cache on a method keeps each module, and what the method returned",
    clear="Kernel.squared.cache_clear()",
    numbers="the method returns a number, so that no tensor is cached",
)
def test_cache_of_a_method(cka_memory: Any, way: str) -> None:
    with cka_memory.measure("fit"):
        for _ in range(3):
            Kernel(cka_memory.device).squared(way == "numbers")
        if way == "clear":
            Kernel.squared.cache_clear()
    Kernel.squared.cache_clear()
