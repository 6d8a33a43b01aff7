"""What a test retains is searched for once, although the whole test is measured as well."""

import pytest

CONFTEST = """
from pytest_cka_memory.holders import survivors

found = survivors.holdings
calls = []

def holdings(*args, **options):
    calls.append(args)
    return found(*args, **options)

survivors.holdings = holdings

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"searched {len(calls)} times")
"""
IN_A_REGION = """
import pytest, torch
KEPT = []

@pytest.mark.zero_retention
def test_leak(cka_memory):
    with cka_memory.measure("part"):
        KEPT.append(torch.ones(1000))
"""
WITHOUT_A_REGION = """
import pytest, torch
KEPT = []

@pytest.mark.zero_retention
def test_leak():
    KEPT.append(torch.ones(1000))
"""


@pytest.mark.parametrize("code", [IN_A_REGION, WITHOUT_A_REGION], ids=["region", "test"])
def test_a_broken_limit_is_explained_by_one_search(pytester: pytest.Pytester, code: str) -> None:
    """A region of the test replaces the whole test in the report, so only that is explained."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(code)
    result = pytester.runpytest("--cka-memory-device=cpu", "-p", "no:xdist")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*held by *KEPT*0*", "*explains 3.9 of 3.9 KB", "searched 1 times"]
    )
