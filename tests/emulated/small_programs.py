"""Small programs for a GPU, one for each kind of operator; none needs a file or the network.

A module that runs them chooses the device first, so they import torch when they are built.
"""

import gc
from collections.abc import Callable
from typing import Any

Build = Callable[[Any], Callable[[], object]]
"""Prepares a program on a device; returns what is measured, whose result is kept."""

PROGRAMS: dict[str, Build] = {}
"""The programs by their names."""


def measure(device: str) -> dict[str, dict[str, int]]:
    """Return five figures of every program on a device, in bytes, measured in this process.

    The reserve is its peak in the region less what was reserved at the start.
    """
    from pytest_cka_memory import MemoryProbe

    probe = MemoryProbe(device)
    gc.collect()
    gc.freeze()  # so that regions do not collect the modules of torch again and again
    found = {}
    for name, build in PROGRAMS.items():
        program = build(probe.device)
        with probe.measure() as region:
            kept = program()
        record = region.record
        del kept, program
        found[name] = {
            "start": record.start_bytes,
            "peak increase": record.peak_bytes - record.start_bytes,
            "retained": record.retained_bytes,
            "net": record.end_bytes - record.start_bytes,
            "reserve": record.reserved_peak_bytes - record.reserved_start_bytes,
        }
    return found


def _program(name: str) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        PROGRAMS[name] = build
        return build

    return add


def _layers() -> Any:
    from torch import nn

    return nn


def _kept_losses(name: str, *, has_probabilities: bool = False) -> Build:
    def build(device: Any) -> Callable[[], object]:
        import torch

        losses = getattr(torch.nn.functional, name)
        values, target = (torch.rand(512, 512, device=device) for _ in range(2))
        if not has_probabilities:
            values = values.requires_grad_()
        return lambda: [losses(values, target).detach() for _ in range(8)]

    return build


for _loss in (
    *("mse_loss", "smooth_l1_loss", "soft_margin_loss", "huber_loss", "l1_loss"),
    "binary_cross_entropy_with_logits",
):
    PROGRAMS[f"eight kept losses, {_loss}"] = _kept_losses(_loss)
_loss = "binary_cross_entropy"
PROGRAMS[f"eight kept losses, {_loss}"] = _kept_losses(_loss, has_probabilities=True)


def _training(model: Any, batch: Any, make_optimizer: Any, loss: Any) -> Callable[[], object]:
    optimizer = make_optimizer(model.parameters())

    def step() -> object:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()
        return optimizer

    return step


def _mlp(device: Any) -> tuple[Any, Any]:
    import torch

    nn = _layers()
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    return model, torch.ones(128, 256, device=device)


@_program("MLP, forward")
def _mlp_forward(device: Any) -> Callable[[], object]:
    model, batch = _mlp(device)
    return lambda: model(batch)


@_program("MLP, training step, SGD with momentum")
def _mlp_sgd(device: Any) -> Callable[[], object]:
    import torch

    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    return _training(*_mlp(device), sgd, lambda y: y.logsumexp(1).mean())


@_program("MLP, training step, cross entropy, clipping, AdamW")
def _mlp_adamw(device: Any) -> Callable[[], object]:
    import torch

    model, batch = _mlp(device)
    target = torch.zeros(128, dtype=torch.long, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> object:
        torch.nn.functional.cross_entropy(model(batch), target).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return optimizer

    return step


@_program("Adam, second step of one 1024 x 512 parameter")
def _adam(device: Any) -> Callable[[], object]:
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1024, 512, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    return optimizer.step


@_program("MLP in bfloat16, training")
def _mlp_bfloat16(device: Any) -> Callable[[], object]:
    model, batch = (one.bfloat16() for one in _mlp(device))
    return lambda: model(batch).square().mean().backward()


@_program("checkpointed MLP, training")
def _checkpointed(device: Any) -> Callable[[], object]:
    from torch.utils.checkpoint import checkpoint

    model, batch = _mlp(device)
    return lambda: checkpoint(model, batch, use_reentrant=False).square().mean().backward()


@_program("gradient of a sum through a linear layer (mm with an expanded gradient)")
def _expanded(device: Any) -> Callable[[], object]:
    import torch

    layer = _layers().Linear(512, 512).to(device)
    batch = torch.ones(2048, 512, device=device)
    return lambda: layer(batch).sum().backward()


def _conv_net(device: Any, *, is_normalized: bool = False) -> tuple[Any, Any]:
    import torch

    nn = _layers()
    norms = [nn.BatchNorm2d(32)] if is_normalized else []
    layers = nn.Conv2d(3, 32, 3, padding=1), *norms, nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return model.to(device), torch.ones(16, 3, 32, 32, device=device)


@_program("convolutional net, forward")
def _conv_forward(device: Any) -> Callable[[], object]:
    import torch

    model, batch = _conv_net(device)
    return torch.no_grad()(lambda: model(batch))


@_program("convolutional net with batch norm, training step, SGD")
def _conv_training(device: Any) -> Callable[[], object]:
    import torch

    model, batch = _conv_net(device, is_normalized=True)
    return _training(model, batch, torch.optim.SGD, lambda y: y.square().mean())


@_program("batch norm, forward and backward")
def _batch_norm(device: Any) -> Callable[[], object]:
    import torch

    layer = _layers().BatchNorm2d(64).to(device)
    batch = torch.ones(16, 64, 16, 16, device=device, requires_grad=True)
    return lambda: layer(batch).square().mean().backward()


@_program("layer norm, GELU and dropout, forward and backward")
def _layer_norm(device: Any) -> Callable[[], object]:
    import torch

    nn = _layers()
    model = nn.Sequential(nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1)).to(device)
    batch = torch.ones(512, 512, device=device, requires_grad=True)
    return lambda: model(batch).square().mean().backward()


@_program("embedding, forward and backward")
def _embedding(device: Any) -> Callable[[], object]:
    import torch

    layer = _layers().Embedding(1000, 64).to(device)
    index = torch.zeros(64, 32, dtype=torch.long, device=device)
    return lambda: layer(index).square().mean().backward()


@_program("LSTM cell, 16 steps")
def _lstm_cell(device: Any) -> Callable[[], object]:
    import torch

    cell = _layers().LSTMCell(64, 128).to(device)
    batch = torch.ones(16, 32, 64, device=device)

    def unroll() -> object:
        state = None
        for index in range(16):
            state = cell(batch[index], state)
        return state

    return unroll


@_program("attention, forward and backward")
def _attention(device: Any) -> Callable[[], object]:
    import torch

    shape = 4, 8, 256, 64
    query, key, value = (torch.ones(shape, device=device, requires_grad=True) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(query, key, value).square().mean().backward()


def _encoder(device: Any) -> tuple[Any, Any]:
    import torch

    layer = _layers().TransformerEncoderLayer(128, 4, 256, batch_first=True).to(device)
    return layer, torch.ones(16, 64, 128, device=device)


@_program("encoder layer of a transformer, evaluation")
def _encoder_forward(device: Any) -> Callable[[], object]:
    import torch

    layer, batch = _encoder(device)
    layer.eval()
    return torch.no_grad()(lambda: layer(batch))


@_program("encoder layer of a transformer, training")
def _encoder_training(device: Any) -> Callable[[], object]:
    layer, batch = _encoder(device)
    return lambda: layer(batch).square().mean().backward()


def _of_matrices(name: str, call: Callable[..., object], *shapes: tuple[int, ...]) -> None:
    def build(device: Any) -> Callable[[], object]:
        import torch

        matrices = [torch.ones(shape, device=device) for shape in shapes]
        return lambda: call(torch, *matrices)

    PROGRAMS[name] = build


_of_matrices("matrix product", lambda torch, x, y: x @ y, (256, 256), (256, 256))
_of_matrices("product with an empty dimension", lambda torch, x, y: x @ y, (256, 0), (0, 256))
_of_matrices("cdist of 128 x 16", lambda torch, x: torch.cdist(x, x), (128, 16))
_of_matrices("cdist of 16 x 16", lambda torch, x: torch.cdist(x, x), (16, 16))
_of_matrices(
    "bilinear",
    lambda torch, x, y, z: torch.nn.functional.bilinear(x, y, z),
    *((64, 32), (64, 32), (16, 32, 32)),
)
_of_matrices(
    "addbmm",
    lambda torch, x, y, z: torch.addbmm(x, y, z),
    *((64, 64), (8, 64, 64), (8, 64, 64)),
)
_of_matrices(
    "solve_triangular",
    lambda torch, x, y: torch.linalg.solve_triangular(x, y, upper=True),
    *((64, 64), (64, 8)),
)
_of_matrices("logsumexp", lambda torch, x: torch.logsumexp(x, 1), (512, 512))
_of_matrices("softmax and top-k", lambda torch, x: x.softmax(1).topk(4), (512, 512))
_of_matrices("einsum", lambda torch, x, y: torch.einsum("bij,bjk->bik", x, y), *[(8, 64, 64)] * 2)


@_program("CKA of a net with itself")
def _cka(device: Any) -> Callable[[], object]:
    import torch

    from cka import CKA

    model, _ = _mlp(device)
    batches = [torch.ones(64, 256) for _ in range(4)]

    def compare() -> object:
        with CKA(model, device=device) as cka:
            return cka.compare(batches, progress=False)

    return compare
