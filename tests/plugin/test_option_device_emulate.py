"""``--cka-memory-device=emulate:cuda``: a user's tests run on torch's CUDA build without a GPU."""

import html
import json
import re
import sys
from xml.etree import ElementTree

import forked_processes
import pytest
import torch

from pytest_cka_memory.core.conditions import fingerprint_of

# Sessions in this process must not import it again: tests replace its functions.
from pytest_cka_memory.plugin import device as session_device  # noqa: F401

NAME = "emulated NVIDIA T4 (no GPU)"
USERS_TESTS = """
import pytest
import torch
from torch import nn

KEPT = []


def test_training():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(8, 64, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert loss.item() > 0


@pytest.mark.zero_retention
def test_leak():
    KEPT.append(torch.ones(2**20, dtype=torch.uint8, device="cuda"))


def test_out_of_memory():
    torch.empty(16 * 2**30, dtype=torch.uint8, device="cuda")


@pytest.mark.zero_retention
def test_next(cka_memory):
    values = torch.ones(2**18, device="cuda")
    assert values.device == cka_memory.device == torch.device("cuda:0")
    del values


def test_outputs_kept_on_the_host(cka_memory):
    with cka_memory.measure() as region:
        KEPT.append(torch.ones(1000, device=cka_memory.device).cpu())
    assert region.host_retained_mb == 0
"""
"""Tests of a user; each names its device as ``cuda``."""


@pytest.fixture(autouse=True)
def _visible_devices(monkeypatch):
    """Run inner sessions without the caller's choice of devices."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def users_session(session, pytester, finished_sessions):
    """Return a session with all reports on a card of 15 GB, and the text of each file."""
    if not finished_sessions:
        pytester.makeconftest("import torch\nTORCH = torch.__version__\n")
        pytester.makeini("[pytest]\ncka_memory_device = emulate:cuda:t4\n")
        files = {"markdown": "r.md", "html": "r.html", "baseline": "b.json"}
        options = [f"--cka-memory-{name}={file}" for name, file in files.items()]
        run = session(
            USERS_TESTS,
            *(*options, "--cka-memory-report", "--cka-memory-update-baseline", "--junitxml=j.xml"),
            forked=True,
        )
        files["junit"] = "j.xml"
        texts = {n: (pytester.path / file).read_text("utf-8") for n, file in files.items()}
        finished_sessions["user"] = run, texts
    return finished_sessions["user"]


@pytest.mark.emulates
def test_users_tests_run_on_the_emulated_card(users_session):
    """Tests with autocast, an optimiser and item() run on the card in the ini file."""
    run, _ = users_session
    run.assert_outcomes(passed=2, failed=3)
    training = run.region_of("test_training")
    assert training["outcome"] == "passed"
    assert training["peak_increase_bytes"] > 2**20


STARTS_OTHERS = """
import os, subprocess, sys

NEW = os.environ["NEW_INTERPRETER"]  # it has no device but by its sitecustomize

RANK = "import os, torch; print(torch.zeros(1, device='cuda:' + os.environ['LOCAL_RANK']).device)"


def test_python():
    program = "import torch; print(torch.cuda.get_device_name(), torch.ones(2).cuda().sum().item())"
    assert subprocess.check_output([NEW, "-c", program], text=True) == "Tesla T4 2.0\\n"


def test_torchrun(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = subprocess.check_output([*torchrun, str(tmp_path / "rank.py")], text=True)
    assert sorted(printed.splitlines()) == ["cuda:0", "cuda:1"]


def test_program_without_the_variables():
    program = "import sys; print('emulated_cuda' in sys.modules)"
    assert subprocess.check_output([NEW, "-c", program], env={}, text=True) == "False\\n"
    assert subprocess.check_output([NEW, "-c", program], text=True) == "True\\n"
"""


@pytest.mark.slow
@pytest.mark.emulates
@pytest.mark.parametrize(
    ("options", "passed"), [((), 3), (("-n1", "-k", "python"), 1)], ids=["serial", "parallel"]
)
def test_processes_that_tests_start_have_the_device(session, monkeypatch, options, passed):
    """Processes that tests start, also by torchrun, have the device if they get the environment."""
    monkeypatch.setenv("NEW_INTERPRETER", sys.executable)
    device = "--cka-memory-device=emulate:cuda:t4,devices=2"
    run = session(STARTS_OTHERS, device, *options, forked=True)
    run.assert_outcomes(passed=passed)


@pytest.mark.emulates
def test_leak_is_named_with_its_holder_and_line(users_session):
    """A leak on the emulated device is named as on a GPU, and the failure says it is emulated."""
    run, _ = users_session
    assert run.region_of("test_leak")["retained_bytes"] == 2**20
    line = USERS_TESTS[: USERS_TESTS.index("KEPT.append")].count("\n") + 1
    run.result.stdout.fnmatch_lines(
        [
            "zero_retention broken: retained 1,048,576 bytes*",
            "  in the whole test, emulated as emulate:cuda:t4 (*, emulated device)",
            "  1 tensor, 1,048,576 bytes (1.00 MB), uint8 (1048576,)",
            f"    made at test_it.py:{line - 1} in test_leak:*",
            "    held by test_it.KEPT[[]0]: freeing it would release 1.00 MB of 1.00 MB",
        ]
    )
    assert "torch.ones(2**20, dtype" in " ".join(run.text.split())


@pytest.mark.emulates
def test_out_of_memory_fails_its_test_only(users_session):
    """Out of memory is torch's error with the card's capacity, and the next test is right."""
    run, _ = users_session
    assert run.region_of("test_out_of_memory")["outcome"] == "failed"
    run.result.stdout.fnmatch_lines(
        ["E *torch.OutOfMemoryError: CUDA out of memory. *GPU 0 has a total capacity of 14.56 GiB*"]
    )
    found = run.region_of("test_next")
    figures = ("start_bytes", "peak_increase_bytes", "retained_bytes", "verdict")
    assert [found[name] for name in figures] == [2**20, 2**20, 0, "ok"]


@pytest.mark.emulates
def test_reports_show_what_is_retained_on_the_host_and_its_holder(users_session):
    """What tests retain on the host is reported; computing values on the CPU retains nothing."""
    run, files = users_session
    region = run.region_of("test_outputs_kept_on_the_host")
    assert (region["retained_bytes"], region["host_retained_bytes"]) == (0, 4000)
    assert {r["host_retained_bytes"] for r in run.report["regions"]} == {0, 4000}
    run.result.stdout.fnmatch_lines(
        [
            "retained on the host 4,000 bytes",
            "    made at test_it.py:* in test_outputs_kept_on_the_host:*",
            "    held by test_it.KEPT[[]1]",
        ]
    )
    assert "host: retained by tensors on the host" in " ".join(run.text.split())
    assert "| host |" in files["markdown"]
    names = r"cka_memory\.region\.host_retained_bytes"
    values = re.findall(rf'name="{names}" value="(\d+)"', files["junit"])
    assert values == ["4000"]
    assert "host_retained_bytes" not in files["baseline"], "no limit judges it"


@pytest.mark.emulates
def test_every_report_labels_its_figures_as_emulated(users_session):
    """Table, JSON, Markdown, HTML, JUnit and baseline all say that figures are emulated."""
    run, files = users_session
    head = run.report["session"]
    assert (head["device"], head["device_name"]) == ("emulate:cuda:t4", NAME)
    assert head["meter"] == "PyTorch's caching allocator, emulated device"
    assert head["cuda"] == torch.version.cuda
    assert head["notes"][0].startswith("EMULATED, not measured on a GPU: ")
    run.result.stdout.fnmatch_lines(
        [
            f"device: emulate:cuda:t4 ({NAME}), torch *",
            "meter: PyTorch's caching allocator, emulated device",
            "  EMULATED, not measured on a GPU: *",
        ]
    )
    notice = "These figures come from torch's CUDA allocator on an emulated device; no GPU was used"
    assert files["markdown"].startswith("### Emulated memory: ")
    assert notice in files["markdown"]
    assert notice in html.unescape(files["html"])
    assert NAME in files["html"]
    (failure,) = ElementTree.fromstring(files["junit"]).iterfind(".//*[@name='test_leak']/failure")
    assert "emulated as emulate:cuda:t4" in failure.text
    entries = json.loads(files["baseline"])[1:]
    assert [entry["nodeid"] for entry in entries] == [
        "test_it.py::test_next",
        "test_it.py::test_training",
    ]
    assert {(entry["device"], entry["meter"]) for entry in entries} == {(NAME, head["meter"])}


@pytest.mark.emulates
def test_baselines_of_real_and_emulated_cards_do_not_mix(users_session):
    """The fingerprints of a real and an emulated card differ, also with equal versions."""
    emulated = users_session[0].report["session"]
    real = {
        **emulated,
        "device": "cuda:0",
        "device_name": "Tesla T4",
        "meter": "PyTorch's caching allocator",
    }
    renamed = {**real, "device_name": emulated["device_name"]}
    assert len({*map(fingerprint_of, (emulated, real, renamed))}) == 3


# pytest-xdist gives the first test to the first worker and the second one to the other.
ON_TWO_CARDS = """
import os
import pytest, torch

KEPT = []

@pytest.mark.zero_retention
@pytest.mark.parametrize("index", range(2))
def test_leak(cka_memory, index):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert torch.cuda.device_count() == 2
    assert cka_memory.device == torch.device("cuda:0")
    KEPT.append(torch.ones(2**20, dtype=torch.uint8, device=f"cuda:{index}"))
"""


@pytest.mark.slow
@pytest.mark.emulates
def test_xdist_workers_have_all_emulated_devices_and_measure_the_first(session, monkeypatch):
    """A worker measures the first emulated device; a leak on another is not counted but noted."""
    pytest.importorskip("xdist")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    device = "--cka-memory-device=emulate:cuda:t4,devices=2"
    run = session(ON_TWO_CARDS, device, "--cka-memory-report", "-n2", forked=True)
    run.assert_outcomes(failed=2)
    leak, other = (run.region_of(f"test_leak[{index}]") for index in range(2))
    assert (leak["retained_bytes"], other["retained_bytes"]) == (2**20, 0)
    (breach,) = other["breaches"]
    assert "because nothing was allocated on cuda:0 during the test" in breach["message"]
    assert {leak["worker"], other["worker"]} == {"gw0", "gw1"}
    assert run.report["session"]["device"] == "emulate:cuda:t4, device 0 of 2"
    run.result.stdout.fnmatch_lines(
        [
            "    held by test_it.KEPT[[]0]: freeing it would release 1.00 MB of 1.00 MB",
            f"device: emulate:cuda:t4, device 0 of 2 ({NAME}), *",
            "  memory on emulated devices other than cuda:0 is not counted",
        ]
    )


MAIN = """
import pytest

for device in ("emulate:cuda", "emulate:cuda", "cpu", "emulate:cuda:h100"):
    options = ["-q", "-pno:hypothesispytest", "--cka-memory-json=r.json"]
    code = pytest.main([*options, f"--cka-memory-device={device}", "test_it.py"])
    print("session:", device, int(code), flush=True)
"""


@pytest.mark.emulates
def test_several_sessions_of_one_process_share_the_device(pytester):
    """Sessions of one process share one card, because torch keeps the first; another is refused."""
    pytester.makepyfile(
        test_it="""
        import torch
        def test_it(cka_memory):
            with cka_memory.measure() as region:
                torch.ones(2**20, dtype=torch.uint8, device="cuda")
            on_device = cka_memory.device.type == "cuda"
            assert region.peak_increase_bytes == on_device * 2**20
        """
    )
    pytester.makepyfile(main=MAIN)
    run = forked_processes.run(["python", "main.py"])
    assert [line for line in run.stdout.splitlines() if line.startswith("session:")] == [
        "session: emulate:cuda 0",
        "session: emulate:cuda 0",
        "session: cpu 0",
        f"session: emulate:cuda:h100 {int(pytest.ExitCode.USAGE_ERROR)}",
    ]
    assert "--cka-memory-device: this process already emulates 1 × NVIDIA A100" in run.stderr
    assert "; start another process for that device\n" in run.stderr


# ---- Refusals ----
