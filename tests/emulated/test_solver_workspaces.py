"""Workspaces of cuSOLVER are as large as a real card said, and asked for as a real card saw it.

``benchmarks/results/card-h200/solvers.jsonl.gz`` has the answers of cuSOLVER of CUDA 13.0 on an
H200; ``card-h100/sweeps.jsonl.gz`` has what torch 2.11.0 asked its allocator for on an H100.
"""

import ctypes
import gzip
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

CARD = Path("benchmarks/card")
RESULTS = Path("benchmarks/results")
PROGRAM = Path(__file__).with_name("library_requests.py")
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
NOT_CALLED = {"{S}potri": "torch does not call it", "{S}gesvdaStridedBatched": "not known"}
ASKED_EVERY = 37
"""One of so many answers is compared: all of them take seven seconds."""

SQUARE = [(1, 1), (2, 2), (8, 8), (32, 32), (33, 33), (100, 100), (200, 200), (256, 256)]
BATCHES = [(4, 8, 8), (2, 64, 64), (10, 33, 33), (100, 16, 16), (0, 3, 3)]
TALL = [(100, 20), (20, 100), (1000, 50), (50, 1000), (512, 511), (4, 100, 20), (2, 20, 100)]
LARGE = [(512, 512), (700, 700), (1024, 1024)]
SHAPES = {
    "svd": SQUARE + BATCHES + TALL + LARGE,
    "eigh": SQUARE + BATCHES + LARGE,
    "eig": SQUARE + BATCHES,
    "ldl": SQUARE + BATCHES + LARGE,
    "lu": SQUARE + LARGE,
}
TYPES = {"svd": "float32", "eigh": "float64", "eig": "float32", "ldl": "complex64", "lu": "float64"}
NEEDS_VALUES = "eig"
"""It reads back whether all numbers are finite, which nothing has computed without values."""
CHOSEN_OTHERWISE = [("eigh", "float64", (2, 64, 64)), ("eigh", "float64", (10, 33, 33))]
"""Batches that newer versions of torch give to another function of cuSOLVER."""
CASES = [(name, TYPES[name], shape) for name, shapes in SHAPES.items() for shape in shapes]


@pytest.fixture(scope="module")
def solver(emulation):
    """Return the emulated cuSOLVER as what asks a real one for sizes."""
    sys.path.insert(0, str(CARD))
    from card_solvers import Solver

    spec = find_spec("emulated_cuda._cuda")
    assert spec is not None
    made = Solver.__new__(Solver)  # sizes need neither a device nor a handle
    made.library, made.handle, made.matrix = ctypes.CDLL(spec.origin), None, torch.empty(1)
    made.infos = dict.fromkeys(("params", "gesvdj", "syevj"))
    return made


def test_sizes_are_those_that_a_card_answered(solver):
    """Each size is equal, or refused as on the card; what is needed on the host is a fit."""
    rows = gzip.decompress((RESULTS / "card-h200/solvers.jsonl.gz").read_bytes()).splitlines()
    compared, wrong = 0, []
    for row in map(json.loads, rows):
        name, letter = row["function"], row["letter"]
        if name in NOT_CALLED:
            continue
        options = {key: row[key] for key in ("vectors", "thin", "batch")}
        for i in range(compared % ASKED_EVERY, len(row["sizes"]), ASKED_EVERY):
            (m, n), expected = row["sizes"][i], row["bytes"][i]
            found = solver.ask(name, letter, {"m": m, "n": n, **options})
            if name == "Xgeev" and n > 64:
                assert found[1] == pytest.approx(expected[1], rel=0.15)
            if name == "Xgeev":
                found, expected = found[:1], expected[:1]
            compared += 1
            if found != expected:
                wrong.append((name, letter, options, m, n, found, expected))
    assert wrong == []
    assert compared > 2500


@pytest.fixture(scope="module")
def recorded():
    """Return what the H100 was asked for in each case."""
    lines = gzip.decompress((RESULTS / "card-h100/sweeps.jsonl.gz").read_bytes()).splitlines()
    rows = {}
    for line in map(json.loads, lines):
        if line["sweep"] == "solver":
            about = line["about"]
            key = about["name"], about["dtype"].removeprefix("torch."), tuple(about["shape"])
            rows[key] = line["row"]["events"]
    return rows


@pytest.fixture(scope="module")
def asked(python):
    """Return, for each case, what it asked for on an emulated H100."""
    found = {}
    for has_values in (False, True):
        cases = [case for case in CASES if (case[0] == NEEDS_VALUES) == has_values]
        calls = [f"decompose({name!r}, {dtype!r}, {shape})" for name, dtype, shape in cases]
        run = python(
            *("-m", "emulated_cuda", "--card", "h100", *(() if has_values else ("--no-values",))),
            *(str(PROGRAM), json.dumps(calls)),
            forked=True,
        )
        lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
        assert lines, run.stderr
        found |= dict(zip(cases, json.loads(lines[-1]).values(), strict=True))
    return found


@pytest.mark.slow
@pytest.mark.emulates
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decompositions_ask_for_what_they_do_on_the_card(recorded, asked, case):
    """Each request and each free is equal, in order."""
    if case[0] == "eig" and VERSION < (2, 10):
        pytest.skip("an older torch calls MAGMA, which the recording does not have")
    if case in CHOSEN_OTHERWISE and VERSION > (2, 11):
        pytest.skip("a newer torch calls another function, which the recording does not have")
    assert asked[case] == recorded[case]
