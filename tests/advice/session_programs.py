"""The session that runs the programs of the table, on each device: for test_followed_hints.py."""

import gc
import importlib
import os

import advice_of_graphs
import advice_of_holders
import advice_of_owners
import advice_of_peaks
import advice_of_reserves
import pytest
from advice_table import CLEANUP, KEEP, ROWS

TABLES = (
    *(advice_of_graphs, advice_of_holders, advice_of_owners, advice_of_peaks),
    advice_of_reserves,
)


def parameters(device):
    found = {}
    for row in ROWS:
        if device in row.devices:
            marks = [row.limit, *([pytest.mark.skip(reason=row.skip)] if row.skip else [])]
            for program in (row.program, *row.followed):
                name = program.__name__
                found[name] = pytest.param(program, marks=marks, id=name)
    return found.values()


def pytest_generate_tests(metafunc):
    metafunc.parametrize("program", parameters(os.environ["ADVICE_DEVICE"]))


@pytest.fixture(scope="session", autouse=True)
def _imports_excluded_from_collection():
    """Every measurement collects, and with the modules of torch that is slow."""
    for name in ("torch._dynamo", "torch.ao.quantization", "torch.distributed.fsdp"):
        importlib.import_module(name)
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
