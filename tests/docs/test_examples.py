"""What the pages say about their examples, beyond what the examples show."""

import json
from itertools import count
from pathlib import Path

import pytest
from docs_pages import block_noted
from forked_processes import run
from test_links import options


@pytest.mark.usefixtures("session")
def test_readme_example_passes_when_its_advice_is_followed() -> None:
    """The README's failing test passes if it keeps the number of the loss, as the page advises."""
    example = block_noted("file: tests/test_evaluation.py").text
    assert example.count(".mean()") == 1
    fixed = example.replace(".mean()", ".mean().item()")
    Path("test_evaluation.py").write_text(fixed, "utf-8")
    done = run(["pytest"], merged=True)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout


@pytest.mark.emulates
@pytest.mark.usefixtures("session")
def test_example_of_the_fixture_passes_on_the_emulated_device() -> None:
    """The page's test of the fixture passes unchanged on an emulated CUDA device."""
    example = block_noted("file: test_fixture_by_example.py").text
    Path("test_fixture_by_example.py").write_text(example, "utf-8")
    options = "--cka-memory-device=emulate:cuda", "--cka-memory-report"
    done = run(["pytest", *options], merged=True)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
    assert "EMULATED" in done.stdout


@pytest.mark.usefixtures("session")
def test_help_of_pytest_describes_every_option() -> None:
    """The help texts are formatted with ``%``, so a single ``%`` in one of them is an error."""
    done = run(["pytest", "--help"], merged=True)
    assert done.returncode == 0, done.stdout
    assert [option for option in sorted(options()) if option not in done.stdout] == []


@pytest.mark.usefixtures("session")
def test_random_order_finds_a_test_that_needs_the_cache_of_another() -> None:
    """The page on troubleshooting says that this test fails if and only if it runs first."""
    pytest.importorskip("pytest_randomly")
    Path("test_cache.py").write_text(block_noted("file: test_cache.py").text, "utf-8")
    statuses: dict[bool, set[int]] = {}
    for seed in count(1):
        assert seed < 20, statuses
        words = ["pytest", "-v", "-p", "randomly", f"--randomly-seed={seed}"]
        done = run(words, merged=True)
        first = done.stdout.index("::test_validation") < done.stdout.index("::test_training")
        statuses.setdefault(first, set()).add(done.returncode)
        if len(statuses) == 2:
            break
    assert statuses == {True: {1}, False: {0}}


@pytest.mark.usefixtures("session")
def test_reports_name_the_cache_that_a_later_test_uses() -> None:
    """A cache is reported for the test that filled it, as the page on troubleshooting says."""
    Path("test_cache.py").write_text(block_noted("file: test_cache.py").text, "utf-8")
    options = "--cka-memory-report", "--cka-memory-explain", "--cka-memory-json=r.json"
    done = run(["pytest", *options], merged=True)
    assert done.returncode == 0, done.stdout
    lines = [line.strip() for line in done.stdout.splitlines()]
    (row,) = [line for line in lines if line.startswith("test_training train ")]
    assert "0.02" in row.split()
    training, validation = json.loads(Path("r.json").read_text("utf-8"))["regions"]
    assert [held["held_by"] for held in training["retained"]] == ["test_cache.MASKS[64]"]
    assert validation["retained_bytes"] == 0


@pytest.mark.usefixtures("session")
def test_limit_for_all_tests_fails_the_test_that_fills_a_cache() -> None:
    """In both orders the test that fills the cache fails, as the page on troubleshooting says."""
    Path("test_cache.py").write_text(block_noted("file: test_cache.py").text, "utf-8")
    for names in (("training", "validation"), ("validation", "training")):
        tests = [f"test_cache.py::test_{name}" for name in names]
        done = run(["pytest", *tests, "-o", "cka_memory_max_retained_mb=0"], merged=True)
        assert f"FAILED {tests[0]}" in done.stdout
        assert "1 failed, 1 passed" in done.stdout
