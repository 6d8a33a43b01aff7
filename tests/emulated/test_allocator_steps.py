"""The simulation of torch's caching allocator, against the allocator itself."""

import pytest


@pytest.mark.parametrize("options", [(), ("--expandable",)], ids=["segments", "expandable"])
def test_simulation_does_what_the_allocator_does(python, options):
    """Some thousand random steps; the script does 200,000 where it is asked to."""
    script = "tests/benchmarks/allocator_steps.py"
    run = python(script, "--steps=4000", "--seed=1", *options)
    assert run.stdout.startswith("4000 steps, "), run.stdout + run.stderr
    assert "no difference" in run.stdout
    assert "steps, 0 of them out of memory" not in run.stdout
