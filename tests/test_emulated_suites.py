"""Which outcomes of two sessions ``emulated_suites.py`` compares, and how it counts them."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"


@pytest.fixture
def suites(monkeypatch):
    """Return the module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import emulated_suites

    return emulated_suites


def test_outcomes_are_compared_by_the_device_in_the_name_and_by_the_same_name(suites):
    """A parametrized test has another name on each device; a test that is called after a device
    has the same name in both sessions.
    """
    on_cpu = {
        "test_a[cpu-float32]": "a on the CPU",
        "test_b_cuda": "b on the CPU",
        "test_c_half_cpu": "c on the CPU",
        "test_d": "d on the CPU",
    }
    on_cuda = {
        "test_a[cuda-float32]": "a",
        "test_b_cuda": "b",
        "test_c_half_cpu": "c",
        "test_e[cuda:0]": "only here",
    }
    known = suites.pairs(
        {name: suites.Outcome(text, 0) for name, text in on_cpu.items()},
        {name: suites.Outcome(text, 1) for name, text in on_cuda.items()},
    )
    assert [(cpu.text, cuda.text) for cpu, cuda in known.values()] == [
        ("a on the CPU", "a"),
        ("b on the CPU", "b"),
        ("c on the CPU", "c"),
    ]
