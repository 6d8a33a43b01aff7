"""Each xdist worker takes one of the visible GPUs, without a CUDA call."""

import os
from types import SimpleNamespace

import pytest

from pytest_cka_memory import integrations


def _worker(number):
    return SimpleNamespace(workerinput={"workerid": f"gw{number}"})


@pytest.mark.parametrize(
    ("visible", "taken"),
    [
        ("0,1", ["0", "1", "0", "1", "0"]),
        ("3", ["3", "3", "3", "3", "3"]),
        ("2, 5 ,7", ["2", "5", "7", "2", "5"]),
        ("GPU-8932f937,GPU-1", ["GPU-8932f937", "GPU-1"] * 2 + ["GPU-8932f937"]),
        ("MIG-a/1/0,MIG-a/2/0", ["MIG-a/1/0", "MIG-a/2/0"] * 2 + ["MIG-a/1/0"]),
    ],
)
def test_worker_n_takes_entry_n_of_the_callers_list(monkeypatch, visible, taken):
    """Worker n gets entry n of the caller's list as it was
    written, and the first after the last.
    """
    for number, entry in enumerate(taken):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        integrations.take_gpu(_worker(number))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == entry


@pytest.mark.parametrize("visible", ["", " ", ","])
def test_hidden_gpus_stay_hidden(monkeypatch, visible):
    """If the caller hides every GPU, the workers see none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert integrations.visible_gpus() == []
    integrations.take_gpu(_worker(0))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_serial_run_keeps_the_callers_gpus(monkeypatch):
    """A session without xdist keeps the GPUs that the caller has given it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    integrations.take_gpu(SimpleNamespace())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_driver_lists_the_gpus_if_the_caller_names_none(monkeypatch, tmp_path):
    """Without a list the driver's folders are the GPUs, and without a driver there are none."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(integrations, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert integrations.visible_gpus() == []
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
    assert integrations.visible_gpus() == ["0", "1"]


# pytest-xdist gives the first test to the first worker and the second one to the other.
SHOW = """
import os
import pytest

@pytest.mark.parametrize("n", range(2))
def test_it({fixture}n):
    print("sees", os.environ["PYTEST_XDIST_WORKER"], os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.mark.parametrize(
    ("fixture", "second"), [("cka_memory, ", "9"), ("", "7,9")], ids=["measured", "unmeasured"]
)
def test_workers_that_measure_see_one_gpu_each(scripted, monkeypatch, fixture, second):
    """Workers that measure see one GPU each; others see all of the caller's."""
    pytest.importorskip("xdist")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,9")
    run = scripted(SHOW.format(fixture=fixture), "-n2", "-rP", forked=True)
    run.assert_outcomes(passed=2)
    first = "7" if fixture else "7,9"
    seen = {tuple(line.split()[1:]) for line in run.result.outlines if line.startswith("sees")}
    assert seen == {("gw0", first), ("gw1", second)}


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_workers_on_a_device_that_is_not_chosen_among_gpus_keep_all(scripted, monkeypatch, device):
    """If tests are not measured on GPUs, a test that uses CUDA
    still sees what the caller gave it.
    """
    pytest.importorskip("xdist")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,9")
    options = ["-n2", "-rP", f"--cka-memory-device={device}"]
    run = scripted(SHOW.format(fixture="cka_memory, "), *options, forked=True)
    run.assert_outcomes(passed=2)
    seen = {tuple(line.split()[1:]) for line in run.result.outlines if line.startswith("sees")}
    assert seen == {("gw0", "7,9"), ("gw1", "7,9")}
