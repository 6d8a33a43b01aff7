"""torch.compile under the meter: really compiled, and its output counted."""

import shutil
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from pytest_cka_memory import MemoryProbe

OLD = torch.ones(100)


def double(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sin()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def test_code_is_compiled_under_the_meter() -> None:
    """Under a plain dispatch mode torch.compile silently runs everything eagerly."""
    counter = CompileCounter()
    compiled = torch.compile(double, backend=counter)
    region = MemoryProbe("cpu").run(compiled, OLD)
    assert counter.frame_count == 1
    assert region.retained_bytes == 400


def test_code_compiled_before_stays_compiled_in_a_region() -> None:
    """It runs compiled there; before torch 2.15 a dispatch mode is a reason to compile anew."""
    counter = CompileCounter()
    compiled = torch.compile(double, backend=counter)
    compiled(OLD)
    region = MemoryProbe("cpu").run(compiled, OLD)
    assert counter.frame_count in (1, 2)
    assert region.retained_bytes == 400


def test_a_compiled_training_step_retains_the_gradient() -> None:
    """Forward and backward through AOTAutograd."""
    x = torch.ones(100, requires_grad=True)
    compiled = torch.compile(double, backend="aot_eager")
    compiled(x).sum().backward()
    x.grad = None
    with MemoryProbe("cpu").measure() as region:
        compiled(x).sum().backward()
    assert region.retained[0].bytes == 400
    # Before torch 2.15 a region is a reason to compile anew, which keeps a scalar of its own.
    assert region.retained_bytes - 400 in (0, 8)


def _leak(compiled: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, int]:
    kept = []
    with MemoryProbe("cpu").measure() as region:
        for _ in range(5):
            kept.append(compiled(OLD))
            region.batch_done()
    return region.growth_bytes_per_batch, region.retained_bytes


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_kept_outputs_of_compiled_code_are_growth(backend: str) -> None:
    """A leak of compiled code is a leak."""
    compiled = torch.compile(double, backend=backend)
    compiled(OLD)
    assert _leak(compiled) == (400.0, 2000)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: no g++")
def test_kept_outputs_of_inductors_code_are_growth() -> None:
    """They reach Python without any operator; no other op ever touches them here."""
    compiled = torch.compile(double)
    compiled(OLD)
    assert _leak(compiled) == (400.0, 2000)
