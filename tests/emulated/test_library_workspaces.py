"""Workspaces of NVIDIA's libraries are as large as those that an H100 was asked for.

The bytes are from ``benchmarks/results/card-h100``: torch 2.11.0+cu130, cuDNN 9.19.
"""

import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("library_requests.py")
ATTENTION = {
    "attend((2, 8, 512, 64))": [256, 2130176],
    "attend((2, 8, 512, 64), gradient=False)": [256],
    "attend((2, 8, 512, 64), is_causal=True)": [256, 2130176],
    "attend((8, 8, 128, 80), (8, 8, 333, 80), (8, 8, 333, 64))": [256, 2654464],
    "attend((3, 8, 512, 32), (3, 1, 1024, 32), masked=True, enable_gqa=True)": [256, 4768000],
    "attend((8, 8, 512, 256), (8, 1, 512, 256), is_causal=True, enable_gqa=True)": [256, 67240192],
}
PLANNED_OTHERWISE = "attend((8, 8, 128, 80), (8, 8, 333, 80), (8, 8, 333, 64))"
NORMALIZATION = {
    "normalize(128, 32, 14, 14)": [203348, 135204],
    "normalize(2, 3, 28, 28)": [1328, 1220],
    "normalize(16, 33, 28, 28)": [78700, 51372],
    "normalize(16, 256, 56, 56)": [1619264, 1072176],
    "normalize(7, 512, 4, 4, 4)": [30000, 21568],
    "normalize(8, 256, 14, 14, dtype=torch.float16)": [21728, 35888],
    "normalize(128, 33, 8, 8, dtype=torch.float16)": [21676, 34092],
    "normalize(1, 3, 4, 4, dtype=torch.float16)": [1112, 1092],
}
FOURIER = {
    "fourier('fft', 256, batch=100)": [],
    "fourier('fft', 16384)": [],
    "fourier('fft', 1009, batch=16)": [],
    "fourier('fft', 32768, batch=2)": [524288],
    "fourier('fft', 100000, dtype=torch.float64)": [1600000],
    "fourier('fft', 1000, 1000, batch=3)": [],
    "fourier('rfft', 127)": [],
    "fourier('rfft', 500, batch=16)": [32000],
    "fourier('rfft', 1000)": [],
    "fourier('rfft', 10000)": [40000],
    "fourier('rfft', 4096, dtype=torch.float64)": [],
    "fourier('rfft', 8192, dtype=torch.float64)": [65536],
    "fourier('rfft', 16384)": [],
    "fourier('rfft', 32768)": [131072],
    "fourier('rfft', 65536)": [262152],
    "fourier('rfft', 100, 100, 100)": [],
}
SOLVERS = {
    "solve(torch.linalg.qr, 32, 32)": [3145856, 136192],
    "solve(torch.linalg.qr, 1000, 50)": [3145856, 332160],
    "solve(torch.linalg.qr, 100, 100)": [3145856, 186624],
    "solve(torch.linalg.qr, 512, 511)": [4190336, 851968],
    "solve(torch.linalg.qr, 1500, 1500, dtype=torch.float64)": [16482432, 4741120],
    "solve(torch.linalg.lu_factor_ex, 8, 8)": [768],
    "solve(torch.linalg.lu_factor_ex, 33, 33)": [1280],
    "solve(torch.linalg.lu_factor_ex, 100, 100, dtype=torch.float64)": [2304],
    "solve(torch.linalg.lu_factor_ex, 512, 512)": [8448],
    "solve(torch.linalg.lu_factor_ex, 700, 700)": [9984],
    "solve(torch.linalg.cholesky_ex, 33, 33)": [160],
    "solve(torch.linalg.cholesky_ex, 200, 200)": [352],
    "solve(torch.linalg.cholesky_ex, 700, 700, dtype=torch.float64)": [2080],
    "solve(torch.linalg.cholesky_ex, 3, 200, 200)": [24],
}
EXPECTED = {**ATTENTION, **NORMALIZATION, **FOURIER, **SOLVERS}
RECURRENT = {  # the workspace and the reserve
    "recur('LSTM', 10, 128, 16, 256)": (17450240, 6553856),
    "recur('LSTM', 100, 33, 16, 512, bidirectional=True)": (121879328, 67584256),
    "recur('GRU', 50, 16, 64, 16, 2, dtype=torch.float16)": (17562496, 333056),
    "recur('GRU', 128, 16, 16, 1024, 2, bidirectional=True, dropout=0.2, dtype=torch.float16)": (
        *(135463296, 110100736),
    ),
    "recur('RNN', 1, 64, 100, 256, 2, bidirectional=True, dropout=0.2, dtype=torch.float16)": (
        *(36337408, 205056),
    ),
}


@pytest.fixture(scope="module")
def asked(python):
    """Return, for each case, the bytes of the workspaces that it asked for on an emulated H100."""
    run = python(
        *("-m", "emulated_cuda", "--card", "h100", "--no-values"),
        *(str(PROGRAM), json.dumps([*EXPECTED, *RECURRENT])),
        forked=True,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    assert lines, run.stderr
    return json.loads(lines[-1])


@pytest.mark.emulates
@pytest.mark.parametrize("case", EXPECTED)
def test_workspaces_are_those_of_the_card(asked, case):
    """Each library asks for as many bytes, in this order, as on a real H100."""
    if case == PLANNED_OTHERWISE and torch.backends.cudnn.version() < 91900:
        pytest.skip("an older cuDNN plans a workspace of 64 bytes more, and no card has shown it")
    assert asked[case] == EXPECTED[case]


@pytest.mark.emulates
@pytest.mark.parametrize("case", RECURRENT)
def test_recurrent_layers_ask_for_what_they_do_on_the_card(asked, case):
    """The reserve is that of the card to the byte, the other workspace is wrong by 3 % at most."""
    workspace, reserve = RECURRENT[case]
    sizes = asked[case]
    position = next(
        i for i, size in enumerate(sizes[:-2]) if sizes[i + 2] == -size and size > 2**23
    )
    assert sizes[position] == pytest.approx(workspace, rel=0.03)
    assert sizes[position + 1] == reserve
