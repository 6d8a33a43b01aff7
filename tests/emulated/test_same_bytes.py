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
