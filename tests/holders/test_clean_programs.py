"""Clean programs are never reported: they retain nothing and do not grow."""

import pytest
from clean import Program, locals_of
from clean_python import PYTHON
from clean_torch import TORCH

from pytest_cka_memory import MemoryProbe


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [*PYTHON, *TORCH], ids=lambda program: program.__name__)
def test_a_clean_program_retains_nothing_and_does_not_grow(program: Program) -> None:
    """A program without a leak retains nothing and does not grow, to the byte."""
    running = program()
    next(running)
    before = locals_of(running)
    with MemoryProbe("cpu").measure() as region:
        for _ in running:
            region.batch_done(4)
    assert region.retained_bytes == 0, region.retained
    assert before is not None  # keeps the locals alive until here
    assert region.growth_bytes_per_batch in (None, 0.0), region.timeline
