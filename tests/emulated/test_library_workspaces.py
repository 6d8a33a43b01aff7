"""Workspaces of NVIDIA's libraries are as large as those that an H100 was asked for.

The bytes are from ``benchmarks/results/card-h100``: torch 2.11.0+cu130, cuDNN 9.19.
"""

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("library_requests.py")
ATTENTION = {
    "attend((2, 8, 512, 64))": [256, 2130176],
    "attend((2, 8, 512, 64), gradient=False)": [256],
    "attend((2, 8, 512, 64), is_causal=True)": [256, 2130176],
    "attend((8, 8, 128, 80), (8, 8, 333, 80), (8, 8, 333, 64))": [256, 2654464],
    "attend((3, 8, 512, 32), (3, 1, 1024, 32), masked=True, enable_gqa=True)": [256, 4768000],
    "attend((8, 8, 512, 256), (8, 1, 512, 256), is_causal=True, enable_gqa=True)": [256, 67240192],
}
EXPECTED = {**ATTENTION}


@pytest.fixture(scope="module")
def asked(python):
    """Return, for each case, the bytes of the workspaces that it asked for on an emulated H100."""
    run = python(
        *("-W", "ignore", "-m", "emulated_cuda", "--card", "h100", "--no-values"),
        *(str(PROGRAM), json.dumps([*EXPECTED])),
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    assert lines, run.stderr
    return json.loads(lines[-1])


@pytest.mark.emulates
@pytest.mark.parametrize("case", EXPECTED)
def test_workspaces_are_those_of_the_card(asked, case):
    """Each library asks for as many bytes, in this order, as on a real H100."""
    assert asked[case] == EXPECTED[case]
