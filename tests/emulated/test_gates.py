"""The gates and the tests of accelerators pass on an emulated device, none of them skipped."""

import json
import re
from importlib.metadata import version

import pytest

PEAK_INCREASES = {
    "batch 64": 102_025_216,  # 97.30 MB
    "batch 128": 171_034_624,  # 163.11 MB
    "batch 256": 342_214_656,  # 326.36 MB
    "batch 512": 690_341_888,  # 658.36 MB
}
"""Peak increases of a self-comparison of a ResNet-18 on an A100, with torch 2.15."""

RESIDENT = """
import re

def pytest_unconfigure():
    with open("/proc/self/status") as status:
        print("resident kB:", re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1])
"""
"""A plugin that prints its process's peak. What the parent could read includes its own memory."""


@pytest.mark.slow
@pytest.mark.emulates
def test_gates_pass_with_the_peaks_of_an_a100(python, tmp_path, capsys):
    """The gates pass with the peaks of an A100 for every size, labelled as emulated, in 4 GB."""
    (tmp_path / "resident.py").write_text(RESIDENT, encoding="utf-8")
    report = tmp_path / "report.json"
    run = python(
        *("-m", "pytest", "-p", "no:cacheprovider", "-p", "resident", "tests/gates", "tests/gpu"),
        *("--cka-memory-device=emulate:cuda,devices=2,values=off", f"--cka-memory-json={report}"),
        forked_children=True,
        PYTHONPATH=str(tmp_path),
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = re.search(r"^=+ (\d+) passed(.*) in ", run.stdout, re.MULTILINE)
    assert summary is not None, run.stdout
    assert not re.search("skipped|xfailed|deselected", summary[2])

    found = json.loads(report.read_text("utf-8"))
    session, regions = found["session"], found["regions"]
    assert session["device"] == "emulate:cuda:a100, device 0 of 2"
    assert session["device_name"] == "emulated NVIDIA A100 80GB (no GPU)"
    assert session["meter"] == "PyTorch's caching allocator, emulated device"
    assert {region["verdict"] for region in regions} <= {"ok", "no limit"}
    peaks = {region["label"]: region["peak_increase_bytes"] for region in regions}
    assert peaks.keys() >= PEAK_INCREASES.keys()
    if version("torch").startswith("2.15."):
        assert {label: peaks[label] for label in PEAK_INCREASES} == PEAK_INCREASES

    resident = int(re.search(r"resident kB: (\d+)", run.stdout)[1]) / 2**20
    with capsys.disabled():
        print(f"\n{summary[1]} tests on an emulated A100: {resident:.2f} GB of resident memory")
    assert resident < 4
