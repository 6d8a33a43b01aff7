"""Recordings from inside: of a region, and of a test that has run out of memory."""

import os

import forked_processes
import pytest

from pytest_cka_memory import MemoryProbe, RegionError
from pytest_cka_memory.snapshots.analysis import Lines, analysed
from pytest_cka_memory.snapshots.reading import read

TESTS = """
import torch

def test_saves(cka_memory):
    torch.cuda.memory._record_memory_history(stacks="python")
    with cka_memory.measure() as region:
        kept = torch.empty(2**20, dtype=torch.uint8, device="cuda")
        region.save_snapshot("saved.pickle")

def test_runs_out_while_recording(cka_memory):
    with cka_memory.measure():
        kept = [torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(20)]
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run the tests on an emulated card; the folder and what was printed."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "test_it.py").write_text(TESTS, encoding="utf-8")
    words = (
        "-q",
        "--cka-memory-device=emulate:cuda:t4,values=off",
        "--cka-memory-json=report.json",
    )
    done = forked_processes.run(
        # In their order: what the second test starts to record, the third one has.
        ["pytest", *words, "-p", "no:randomly", "test_it.py"],
        folder=folder,
        environment={**os.environ, "COLUMNS": "200"},
    )
    return folder, done.stdout


@pytest.mark.emulates
def test_region_saves_what_torch_has_recorded(session):
    """The file has the allocation of the region, with its line."""
    folder, _ = session
    snapshot = read(folder / "saved.pickle")
    found = analysed(snapshot, snapshot.devices[0])
    rows = Lines(snapshot).grouped(found.live(found.end))
    assert ("test_it.py:7 in test_saves", 2**20) in [(row.line, row.bytes) for row in rows]


@pytest.mark.emulates
def test_recording_is_written_beside_the_report(session):
    """If the program records, its recording is beside the report, and the commands name it."""
    folder, output = session
    (path,) = folder.glob("test_it.py_test_runs_out_while_recording-*.pickle")
    assert f"python -m pytest_cka_memory snapshot {path.name}" in output.replace(f"{folder}/", "")
    snapshot = read(path)
    found = analysed(snapshot, snapshot.devices[0])
    assert [refusal.requested_bytes for refusal in found.refusals] == [2**30]
    assert found.peak.used_bytes >= 13 * 2**30


def test_device_without_a_history_is_an_error(tmp_path):
    """On the CPU nothing is recorded: the error says what to write."""
    with (
        MemoryProbe("cpu").measure("nothing") as region,
        pytest.raises(RegionError, match="cpu records no history of allocations; on a CUDA device"),
    ):
        region.save_snapshot(tmp_path / "no.pickle")
    assert not (tmp_path / "no.pickle").exists()
