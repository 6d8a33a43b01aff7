"""Holders that only a pytest session has: fixtures, captured logs and warnings, failed tests."""

import json
from typing import Any

import forked_processes
import pytest

CLEAN = """
import logging
import sys

import forked_processes
import pytest
import torch

pytestmark = pytest.mark.zero_retention

@pytest.fixture(scope="module")
def model():
    return torch.nn.Linear(5, 5)

@pytest.fixture
def batch():
    yield torch.ones(250)

def test_first_to_use_a_module_fixture(model, batch):
    with torch.no_grad():
        model(batch[:5])

def test_second(model, batch):
    batch.add_(1)

@pytest.mark.xfail(strict=True)
def test_that_fails():
    x = torch.ones(250)
    assert not len(x)

def test_after_one_that_failed():
    assert sys.exc_info() == (None, None, None)

def test_expected_exception():
    with pytest.raises(ValueError, match="x") as caught:
        x = torch.ones(250)
        raise ValueError("x")
    del caught, x

def test_patched(monkeypatch):
    monkeypatch.setattr(torch, "planted", torch.ones(250), raising=False)
    monkeypatch.undo()

def test_logged_as_text(caplog):
    logging.getLogger("clean").warning(f"loss {torch.ones(250).sum().item()}")
    assert caplog.records

@pytest.mark.parametrize("x", [torch.ones(250)], ids=["x"])
def test_parameter(x):
    x.add_(1)
"""
LEAKS = """
import logging
import warnings

import forked_processes
import pytest
import torch

pytestmark = pytest.mark.zero_retention

@pytest.fixture
def results():
    return []

class TestClass:
    def test_fixture(self, results):
        results.append(torch.ones(250))

    def test_attribute_of_the_test(self):
        self.kept = torch.ones(250)

    def test_warned(self, recwarn):
        warnings.warn(UserWarning(torch.ones(250)))

    def test_logged(self):
        logging.getLogger("leak").warning("loss %s", torch.ones(250))

    def test_patched(self, monkeypatch):
        monkeypatch.setenv("planted", "1")
        monkeypatch.setitem({}, "x", torch.ones(250))

    def test_finalizer(self, request):
        x = torch.ones(250)
        request.addfinalizer(lambda: x)
"""
HOLDERS = {
    "test_fixture": "results[0] (a fixture)",
    "test_attribute_of_the_test": "self.kept (the test's)",
    "test_warned": "recwarn._list[0].message.args[0] (a fixture)",
    "test_logged": ".args[0]",
    "test_patched": "['x'] (a fixture)",
    "test_finalizer": ".__closure__[0].cell_contents",
}


@pytest.fixture
def regions(pytester: pytest.Pytester):
    """Return a function that runs tests in their own process and returns regions by test name."""

    def run(source: str, **outcomes: int) -> dict[str, dict[str, Any]]:
        pytester.makepyfile(test_it=source)
        options = ["--cka-memory-json=r.json", "--cka-memory-device=cpu", "-p", "no:randomly"]
        forked_processes.run_pytest(*options).assert_outcomes(**outcomes)
        report = json.loads((pytester.path / "r.json").read_text("utf-8"))
        return {region["nodeid"].rpartition("::")[2]: region for region in report["regions"]}

    return run


def test_clean_tests_retain_nothing_in_a_session(regions) -> None:
    """What fixtures and pytest itself keep longer than a test does not count in clean tests."""
    found = regions(CLEAN, passed=7, xfailed=1)
    assert {r["retained_bytes"] for name, r in found.items() if name != "test_that_fails"} == {0}


@pytest.mark.slow
def test_leaks_through_fixtures_and_pytest_name_their_holder(regions) -> None:
    """The path of a tensor that a fixture holds starts at the fixture."""
    found = regions(LEAKS, failed=len(HOLDERS))
    for name, holder in HOLDERS.items():
        (holding,) = found[name]["retained"]
        assert holding["bytes"] == found[name]["retained_bytes"] == 1000
        assert holder in holding["held_by"], name
        assert holding["created_at"][0].endswith(name)
    assert "such as loss.item()" in found["test_logged"]["retained"][0]["hint"]
