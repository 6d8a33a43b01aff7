"""Tests that training on the emulated device ends with the weights that the CPU gets.

``test_on_device.py`` runs them in a new process with the plugin ``values_on_both``.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

STEPS = 5
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
Weights = list[torch.Tensor]


def assert_same_training(
    model: nn.Module, train: Callable[[nn.Module, str], Weights], tolerance: float = 1e-5
) -> None:
    """Train copies of a model on the CPU and on the device, and compare what `train` returns.

    The results must also differ from the weights at the start, or nothing was trained.
    """
    before = [weight.detach().clone() for weight in model.parameters()]
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        results = train(copy.deepcopy(model).to(device), device)
        assert all(tensor.device.type == device for tensor in results)
        found.append([tensor.detach().cpu() for tensor in results])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    assert any(not torch.equal(old, new) for old, new in zip(before, found[1], strict=False))


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6).to(device), torch.randint(3, (4,)).to(device)


def weights_of(model: nn.Module) -> Weights:
    return [*model.parameters(), *model.buffers()]


# ---- Models ----


def test_recurrent_network_on_packed_sequences_trains_as_on_the_cpu():
    """A GRU in two directions, on sequences of different lengths, trains as on the CPU."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(3, 4, batch_first=True, bidirectional=True)
            self.output = nn.Linear(8, 2)

        def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)
            padded, _ = pad_packed_sequence(self.inner(packed)[0], batch_first=True)
            return self.output(padded.mean(1))

    def train(model, device):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            values, labels = torch.randn(3, 5, 3).to(device), torch.randint(2, (3,)).to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(values, torch.tensor([2, 5, 3])), labels).backward()
            optimizer.step()
        return weights_of(model)

    assert_same_training(Network(), train)


def test_channels_last_convolutions_train_as_on_the_cpu():
    """Channels-last convolutions keep their layout and train as on the CPU, with its statistics."""
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
    model = nn.Sequential(*layers, nn.Conv2d(4, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def train(model, device):
        model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(STEPS):
            images = torch.randn(4, 3, 8, 8).to(device, memory_format=torch.channels_last)
            assert model[0](images).is_contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(model(images), torch.randint(2, (4,)).to(device)).backward()
            optimizer.step()
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        return weights_of(model)

    assert_same_training(model, train, tolerance=1e-4)


# ---- Precision ----


def test_gradient_scaling_skips_the_steps_that_the_cpu_skips():
    """A scale too large for half precision shrinks as on the CPU, until gradients are finite."""
    scales: dict[str, list[float]] = {"cpu": [], "cuda": []}

    def train(model, device):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**20)
        for _ in range(STEPS + 3):
            inputs, labels = batch(device)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                output = model(inputs)
            scaler.scale(F.cross_entropy(output.float(), labels)).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales[device].append(scaler.get_scale())
        return weights_of(model)

    assert_same_training(perceptron(), train, tolerance=1e-3)
    assert scales["cuda"] == scales["cpu"]
    assert scales["cuda"][0] == 2.0**19
    assert scales["cuda"][-1] == scales["cuda"][-2]


def test_autocast_to_bfloat16_trains_as_on_the_cpu():
    """Autocast to bfloat16 trains as on the CPU; loss and weights are in single precision."""

    def train(model, device):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            inputs, labels = batch(device)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                output = model(inputs)
            assert output.dtype is torch.bfloat16
            F.cross_entropy(output.float(), labels).backward()
            optimizer.step()
        return weights_of(model)

    assert_same_training(perceptron(), train, tolerance=5e-3)


# ---- Optimizers ----

OPTIMIZERS = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"capturable": True, "foreach": True}),
    (torch.optim.AdamW, {"capturable": True, "foreach": False, "amsgrad": True}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.Adagrad, {"foreach": True}),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    OPTIMIZERS,
    ids=["-".join((kind.__name__, *options)) for kind, options in OPTIMIZERS],
)
def test_forms_of_an_optimizer_take_the_steps_of_its_plain_form(kind, options):
    """Every form of an optimizer takes the steps of the CPU's plain form."""
    if (kind, options) == (torch.optim.Adagrad, {"fused": True}) and VERSION < (2, 12):
        weight = nn.Parameter(torch.ones(2, device="cuda"))
        weight.grad = torch.ones_like(weight)
        with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be"):
            kind([weight], **options).step()  # torch refuses it on a card, too
        options = {}
    plain = {"foreach": False, "fused": False}
    plain.update({key: v for key, v in options.items() if key not in (*plain, "capturable")})

    def train(model, device):
        own = options if device == "cuda" else plain
        optimizer = kind(model.parameters(), lr=0.05, weight_decay=0.01, **own)
        for _ in range(STEPS):
            inputs, labels = batch(device)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return weights_of(model)

    assert_same_training(perceptron(), train)


# ---- Ways to train ----


def checkpointed(model, inputs, labels):
    hidden = checkpoint(model[:2], inputs, use_reentrant=False)
    F.cross_entropy(model[2](hidden), labels).backward()


def clipped(model, inputs, labels):
    F.cross_entropy(model(inputs), labels).backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    assert norm.item() > 0.1
    total = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
    assert total.item() == pytest.approx(0.1, rel=1e-3)


def accumulated(model, inputs, labels):
    for part, of_part in zip(inputs.split(2), labels.split(2), strict=True):
        (F.cross_entropy(model(part), of_part) / 2).backward()


@pytest.mark.parametrize("backward", [checkpointed, clipped, accumulated])
def test_gradients_of_a_step_train_as_on_the_cpu(backward):
    """Checkpointing, clipping, and several backward passes before a step train as on the CPU."""

    def train(model, device):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward(model, *batch(device))
            optimizer.step()
        return weights_of(model)

    assert_same_training(perceptron(), train)


def test_averaged_weights_are_those_of_the_cpu():
    """Exponentially averaged weights and batch statistics are those of a training on the CPU."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def train(model, device):
        average = swa_utils.AveragedModel(
            model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            inputs, labels = batch(device)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            average.update_parameters(model)
        inputs, _ = batch(device)
        return [*average.module.parameters(), *average.module.buffers(), average.eval()(inputs)]

    assert_same_training(model, train, tolerance=1e-4)
