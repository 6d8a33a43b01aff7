"""Memory is the same whether values are computed or not."""

import json

import pytest

MEASURE = """
import sys
sys.path.insert(0, "tests/emulated")
import json
from small_programs import measure
print(json.dumps(measure(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.emulates
def test_programs_need_the_same_bytes_with_and_without_values(python):
    """The programs in ``small_programs.py`` have the same five figures with and without values."""
    found = {}
    for name in ("emulate:cuda:a100", "emulate:cuda:a100,values=off"):
        run = python("-c", MEASURE, name, forked=True)
        assert run.returncode == 0, run.stderr
        found[name] = json.loads(run.stdout.splitlines()[-1])
    with_values, without = found.values()
    assert len(with_values) >= 34
    different = {
        program: (figures, without[program])
        for program, figures in with_values.items()
        if figures != without[program]
    }
    assert different == {}


NEW_OBJECTS = """
import gc, json
import emulated_cuda
emulated_cuda.load("t4")
import torch

square, row = torch.ones(8, 8, device="cuda"), torch.ones(8, device="cuda")
operators = {
    "product with a number": lambda: square * 2,
    "sum with a number": lambda: 1 + square,
    "in place with a number": lambda: row.add_(1),
    "comparison with a number": lambda: square > 0,
    "product": lambda: square @ square,
    "random numbers": lambda: torch.nn.functional.dropout(square),
    "several results": lambda: square.max(0),
    "a number that is read": lambda: row[0].item(),
    "rows that are set": lambda: square.__setitem__(0, 1.0),
}
found = {}
for name, operator in operators.items():
    gc.collect()  # the objects that CPython keeps for later are gone
    gc.disable()
    for _ in range(60):
        operator()
    before = gc.get_count()[0]
    for _ in range(100):
        operator()
    found[name] = gc.get_count()[0] - before
    gc.enable()
print(json.dumps(found))
"""


@pytest.mark.emulates
def test_computing_values_adds_nothing_to_what_the_collector_counts(python):
    """Otherwise it runs earlier with values than without, and garbage of a program takes less."""
    run = python("-c", NEW_OBJECTS)
    assert run.returncode == 0, run.stderr
    counted = json.loads(run.stdout.splitlines()[-1])
    assert {name: count for name, count in counted.items() if count > 10} == {}
