"""torch.compile in a region: the code is compiled, and its outputs are counted."""

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


@pytest.fixture(autouse=True, scope="module")
def _old(imports_excluded_from_search: None) -> None:
    global OLD
    OLD = torch.ones(100)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def test_code_is_compiled_in_a_region(cpu: MemoryProbe) -> None:
    """A region keeps torch.compile working, which an ordinary dispatch mode silently turns off."""
    counter = CompileCounter()
    compiled = torch.compile(double, backend=counter)
    region = cpu.run(compiled, OLD)
    assert counter.frame_count == 1
    assert region.retained_bytes == 400


def test_code_compiled_before_a_region_stays_compiled_in_it(cpu: MemoryProbe) -> None:
    """Code that was compiled before stays compiled; torch before 2.15 compiles once more."""
    counter = CompileCounter()
    compiled = torch.compile(double, backend=counter)
    compiled(OLD)
    region = cpu.run(compiled, OLD)
    assert counter.frame_count in (1, 2)
    assert region.retained_bytes == 400


@pytest.mark.slow
def test_compiled_training_step_retains_the_gradient(cpu: MemoryProbe) -> None:
    """AOTAutograd compiles forward and backward; such a step retains its gradient."""
    x = torch.ones(100, requires_grad=True)
    compiled = torch.compile(double, backend="aot_eager")
    compiled(x).sum().backward()
    x.grad = None
    with cpu.measure() as region:
        compiled(x).sum().backward()
    assert region.retained[0].bytes == 400
    # Before torch 2.15 a region causes another compilation, which keeps a scalar.
    assert region.retained_bytes - 400 in (0, 8)


def _leak(cpu: MemoryProbe, compiled: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, int]:
    """Return growth and retained bytes of a loop that keeps all outputs."""
    kept = []
    with cpu.measure() as region:
        for _ in range(5):
            kept.append(compiled(OLD))
            region.batch_done()
    return region.growth_bytes_per_batch, region.retained_bytes


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_kept_outputs_of_compiled_code_are_growth(cpu: MemoryProbe, backend: str) -> None:
    """Outputs of compiled code that are kept are growth, like any other leak."""
    compiled = torch.compile(double, backend=backend)
    compiled(OLD)
    assert _leak(cpu, compiled) == (400.0, 2000)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: no g++")
def test_kept_outputs_of_inductor_code_are_growth(cpu: MemoryProbe) -> None:
    """Inductor returns outputs without calling an operator; if they are kept, they are growth."""
    compiled = torch.compile(double)
    compiled(OLD)
    assert _leak(cpu, compiled) == (400.0, 2000)
