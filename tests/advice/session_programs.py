"""The session that runs the programs of the table; ``test_advice.py`` starts it on each device."""

import gc

import advice_of_graphs
import advice_of_holders
import advice_of_owners
import advice_of_peaks
import pytest
from advice_table import CLEANUP, KEEP, ROWS

TABLES = advice_of_graphs, advice_of_holders, advice_of_owners, advice_of_peaks


def parameters(device):
    for row in ROWS:
        if device not in row.devices:
            continue
        skips = [pytest.mark.skip(reason=row.skip)] if row.skip else []
        for program in (row.program, *row.followed):
            yield pytest.param(program, marks=[row.limit, *skips], id=program.__name__)


def pytest_generate_tests(metafunc):
    device = metafunc.config.getoption("--cka-memory-device")
    metafunc.parametrize("program", parameters(device))


@pytest.fixture(scope="session", autouse=True)
def _imports_excluded_from_collection():
    """Every measurement collects, and with the modules of torch that is slow."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean():
    yield
    KEEP.clear()
    CLEANUP.close()


def test_program(program, cka_memory):
    """Run a program, whose limit is a marker of its parameter."""
    program(cka_memory)
