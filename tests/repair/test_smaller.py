"""Inputs of a test are made smaller where its values would take too long."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from pytest_cka_memory.repair.smaller import Sizes, instead_of, made_smaller, sizes_to_try

BEFORE, NOW = Sizes(8, 100), Sizes(4, 10)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: torch.zeros(8, 100), (4, 10)),
        (lambda: torch.ones((8, 100)), (4, 10)),
        (lambda: torch.randint(50, (8, 100)), (4, 10)),
        (lambda: torch.randint(0, 50, (8,)), (4,)),
        (lambda: torch.randint(8, size=(8, 100)), (4, 10)),
        (lambda: torch.full((8, 3), 8), (4, 3)),
        (lambda: torch.randn(8, 3, 32, 32), (4, 3, 32, 32)),
        (lambda: torch.rand(100, 8), (100, 8)),
        (lambda: torch.nn.Linear(8, 8).weight, (8, 8)),
    ],
    ids=[
        *("numbers", "tuple", "text", "labels", "named", "full", "images", "no-batch", "weights"),
    ],
)
def test_tensors_of_a_batch_are_smaller(make: Any, shape: tuple[int, ...]) -> None:
    """A tensor whose first size is the batch is made with fewer rows, and fewer tokens."""
    with made_smaller(BEFORE, NOW) as shrunk:
        assert make().shape == shape
    assert shrunk.tensors == (shape[0] == NOW.batch)


def test_batches_of_a_loader_are_cut() -> None:
    """Images, texts and labels lose rows, and texts tokens, in whatever a loader makes of them."""
    images, text, labels = torch.zeros(16, 3, 100), torch.zeros(16, 100).long(), torch.zeros(16)
    rows = [
        {"images": i, "text": t, "pair": (n, "name")}
        for i, t, n in zip(images, text, labels, strict=True)
    ]
    loader = DataLoader(rows, 8)
    with made_smaller(BEFORE, NOW) as shrunk:
        first, _ = loader
    assert (first["images"].shape, first["text"].shape) == ((4, 3, 100), (4, 10))
    assert (first["pair"][0].shape, len(first["pair"][1])) == ((4,), 8)
    assert shrunk.tensors == 6
    assert next(iter(loader))["images"].shape == (8, 3, 100)


def test_what_a_module_makes_keeps_its_size() -> None:
    """Parameters and masks of the user's own modules are not inputs."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros(8)

    with made_smaller(BEFORE, NOW) as shrunk:
        module = Own()
        assert (module.scale.shape, module(torch.tensor(1.0)).shape) == ((8,), (8,))
    assert shrunk.tensors == 0


@pytest.mark.parametrize(
    ("before", "smaller"),
    [
        (Sizes(8, 1024), [Sizes(4, 1024), Sizes(4, 64)]),
        (Sizes(6, 0), [Sizes(2, 0)]),
        (Sizes(3, 0), [Sizes(1, 0)]),
        (Sizes(1, 32), []),
        (Sizes(), []),
    ],
    ids=str,
)
def test_smaller_sizes(before: Sizes, smaller: list[Sizes]) -> None:
    """The batch is a divisor, so that micro-batches remain possible; then there are few tokens."""
    assert list(before.smaller) == smaller


def test_sizes_in_words() -> None:
    """The proof says with which sizes it was made."""
    text = instead_of(Sizes(8, 1024), Sizes(4, 64))
    assert text == "batches of 4 instead of 8, 64 tokens instead of 1024"


def test_sizes_of_a_proof_depend_on_the_work() -> None:
    """A step of much work begins with smaller sizes; one of little with its own."""
    before = Sizes(8, 1024)

    def sizes(peak_bytes: int, flops: int) -> list[Sizes]:
        return list(sizes_to_try(before, peak_bytes=peak_bytes, flops=flops, seconds=120))

    assert sizes(2**20, 10**6)[0] == Sizes(8, 1024)
    assert sizes(2**20, 10**13)[0] == Sizes(4, 64)
    assert sizes(2**60, 10**6) == [Sizes(4, 64)]
