"""Thirty programs whose kernels need scratch memory, as tests; with PLANTED=1 each needs 10 % more.

What is planted is live while the program runs, like a buffer that somebody forgot to free.
"""

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from pytest_cka_memory import MemoryProbe

PLANTED = bool(os.environ.get("PLANTED"))


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return an input that needs a gradient."""
    return torch.ones(*shape, dtype=dtype, requires_grad=True)


def trained(module: nn.Module, *shape: int) -> None:
    """Run a module forward and backward."""
    module(leaf(*shape)).sum().backward()


def recurrent(module: nn.Module) -> None:
    """Run a recurrent network forward and backward."""
    module(torch.ones(20, 2, 64))[0].sum().backward()


def attention(shape: tuple[int, ...], *, trains: bool) -> None:
    """Run attention, which divides its work by threads."""
    query = torch.ones(*shape, requires_grad=trains)
    found = F.scaled_dot_product_attention(query, query, query)
    if trains:
        found.sum().backward()


def autocast() -> None:
    """Run a product in half precision."""
    with torch.autocast("cpu", torch.bfloat16):
        nn.Linear(500, 500)(torch.ones(8, 500)).sum().backward()


def optimizer() -> None:
    """Make a step of Adam."""
    model = nn.Linear(300, 300)
    steps = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 300)).sum().backward()
    steps.step()


def reductions() -> None:
    """Reduce a matrix in several ways."""
    values = leaf(1000, 1000)
    (values.sum() + values.var() + values.logsumexp(1).sum() + values.norm()).backward()


def ctc() -> None:
    """Compute the loss of connectionist temporal classification."""
    scores = torch.randn(50, 16, 20).log_softmax(2).detach().requires_grad_()
    lengths = torch.full((16,), 50), torch.full((16,), 30)
    F.ctc_loss(scores, torch.randint(1, 20, (16, 30)), *lengths).backward()


def pools() -> None:
    """Pool and resize images."""
    values = leaf(2, 16, 64, 64)
    pooled = F.max_pool2d(values, 2).sum() + F.adaptive_avg_pool2d(values, 7).sum()
    (pooled + F.interpolate(values, scale_factor=2, mode="bilinear").sum()).backward()


def bags() -> None:
    """Sum rows of an embedding."""
    nn.EmbeddingBag(5000, 64)(torch.arange(5000), torch.arange(0, 5000, 50)).sum().backward()


def square() -> torch.Tensor:
    """Return a matrix that can be inverted."""
    return torch.rand(200, 200) + 200 * torch.eye(200)


PROGRAMS: dict[str, Callable[[], object]] = {
    "layer norm": lambda: trained(nn.LayerNorm(200_000), 2, 200_000),
    "group norm": lambda: trained(nn.GroupNorm(4, 64), 2, 64, 64, 64),
    "batch norm": lambda: trained(nn.BatchNorm2d(64), 2, 64, 64, 64),
    "convolution": lambda: trained(nn.Conv2d(20, 20, 3, padding=1), 1, 20, 64, 64),
    "convolution by channel": lambda: trained(nn.Conv2d(20, 20, 3, groups=20), 1, 20, 64, 64),
    "transposed convolution": lambda: trained(nn.ConvTranspose2d(17, 17, 3), 1, 17, 32, 32),
    "convolution in one dimension": lambda: trained(nn.Conv1d(8, 8, 3), 4, 8, 500),
    "convolution in three dimensions": lambda: trained(nn.Conv3d(8, 8, 3), 1, 8, 16, 16, 16),
    "attention": lambda: attention((1, 2, 256, 64), trains=True),
    "long attention": lambda: attention((1, 1, 2048, 16), trains=False),
    "transformer": lambda: trained(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2, 100, 64),
    "embedding": lambda: nn.Embedding(5000, 64)(torch.arange(50)).sum().backward(),
    "embedding bag": bags,
    "autocast": autocast,
    "GRU": lambda: recurrent(nn.GRU(64, 64)),
    "LSTM": lambda: recurrent(nn.LSTM(64, 64)),
    "linear": lambda: trained(nn.Linear(500, 500), 64, 500),
    "softmax": lambda: leaf(500, 500).softmax(1).sum().backward(),
    "reductions": reductions,
    "optimizer": optimizer,
    "CTC loss": ctc,
    "pools": pools,
    "Fourier transform": lambda: torch.fft.fft(leaf(100, 1000)).abs().sum().backward(),
    "sort": lambda: torch.rand(300_000).sort(),
    "unique": lambda: (torch.rand(100_000) * 100).int().unique(),
    "rows of a matrix": lambda: leaf(10_000, 64)[torch.arange(0, 10_000, 2)].sum().backward(),
    "solve": lambda: torch.linalg.solve(square(), square()),
    "singular values": lambda: torch.linalg.svd(square()),
    "distances": lambda: torch.cdist(torch.rand(500, 64), torch.rand(500, 64)),
    "products of a batch": lambda: torch.bmm(torch.rand(8, 100, 100), torch.rand(8, 100, 100)),
}


def tenth_of(program: Callable[[], object]) -> int:
    """Return how many numbers take a tenth of what a program needs."""
    return MemoryProbe("cpu").run(program).peak_increase_bytes // 40 + 1


@pytest.mark.memory_baseline
@pytest.mark.parametrize("name", PROGRAMS)
def test_against_the_baseline(cka_memory, name):
    """The same program, or one that needs 10 % more."""
    torch.manual_seed(0)
    PROGRAMS[name]()  # a first run may allocate what stays
    size = tenth_of(PROGRAMS[name]) if PLANTED else 0
    with cka_memory.measure("program"):
        planted = torch.empty(size)
        PROGRAMS[name]()
        del planted


@pytest.mark.memory_baseline(at_most="1.05 x same")
@pytest.mark.parametrize("variant", ["same", "other"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_against_another_test(cka_memory, name, variant):
    """The same program in both variants, or one that needs 10 % more."""
    torch.manual_seed(0)
    PROGRAMS[name]()
    adds = PLANTED and variant == "other"
    size = tenth_of(PROGRAMS[name]) if adds else 0
    with cka_memory.measure("program"):
        planted = torch.empty(size)
        PROGRAMS[name]()
        del planted
