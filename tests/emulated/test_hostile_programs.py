"""Programs that misuse tensors and the runtime: an error or a right result, and never a signal."""

from pathlib import Path

import hostile_programs
import pytest

NAMES = [*hostile_programs.ON_BOTH, *hostile_programs.ON_CARD]


@pytest.fixture(scope="module")
def outcomes(python) -> dict[str, str]:
    """Return what each program printed, all of which run in one process."""
    run = python("-m", "hostile_programs", forked=True, PYTHONPATH=str(Path(__file__).parent))
    lines = [line.partition(": ") for line in run.stdout.splitlines()]
    found = {name: result for name, _, result in lines}
    # What comes after the program that has ended the process did not run.
    return {name: found.get(name, f"{run.returncode}: {run.stderr[-2000:]}") for name in NAMES}


def test_there_are_a_hundred_programs() -> None:
    """What is said of a hundred programs is of so many, each under a name of its own."""
    assert len(set(NAMES)) == len(NAMES) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_hostile_program_gets_an_error_or_a_right_result(outcomes, name) -> None:
    """It raises where the CPU does, or has its result; the device can be used afterwards."""
    assert outcomes[name] == "passed"
