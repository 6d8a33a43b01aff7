"""Which outcomes of two sessions ``emulated_suites.py`` compares, and how it counts them."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


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


def test_row_counts_each_test_once(suites):
    """The counts by outcome add up to the number of tests that ran."""
    line = "a.py:1: torch.where(mask, x, y)"
    passed, failed = suites.Outcome("passed", 2), suites.Outcome("failed: why", 0)
    skipped = suites.Outcome("skipped: no GPU", 0)
    refused = suites.Outcome("failed: devices", 1, line)
    known = {
        "same": (passed, passed),
        "fails on both": (failed, failed),
        "needs a GPU": (skipped, passed),
        "refused": (passed, refused),
        "other": (passed, failed),
        "fails here only": (skipped, failed),
    }
    assert suites.Comparison(known, {"refused"}, repeated=1).row() == {
        "ran": 6,
        "allocating": 3,
        "same": 2,
        "failed on both": 1,
        "skipped on the CPU": 1,
        "refused by PyTorch": 1,
        "refused without values": 1,
        "other": 2,
        "refused at": {line: 1},
        "reasons to skip": {"skipped: no GPU": 1},
        "others": [
            {"test": "other", "cpu": "passed", "device": "failed: why", "line": ""},
            {
                "test": "fails here only",
                "cpu": "skipped: no GPU",
                "device": "failed: why",
                "line": "",
            },
        ],
    }


def test_version_is_the_commit_of_a_clone_or_that_in_the_name_of_a_folder(suites, tmp_path):
    """A source distribution has no commit."""
    folder = tmp_path / "transformers-5.24.0"
    folder.mkdir()
    assert suites.version_of(folder) == "5.24.0"
