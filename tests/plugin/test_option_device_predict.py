"""``--cka-memory-device=predict:cuda``: every report labels its figures as predicted."""

import pytest

pytest.importorskip("xdist")

TESTS = """
import pytest, torch
KEPT = []

@pytest.mark.zero_retention
def test_keeps(cka_memory):
    KEPT.append(torch.ones(2**20, dtype=torch.uint8, device=cka_memory.device))

def test_asks(cka_memory):
    assert torch.ones(3, device=cka_memory.device).sum().item() == 3

def test_does_not(cka_memory):
    assert torch.ones(3, device=cka_memory.device).sum().ndim == 0
"""


@pytest.fixture
def run_on(session, finished_sessions):
    """Run the tests above on a predicted device, once for all tests of this module."""

    def run(device, *workers):
        key = (device, *workers)
        if key not in finished_sessions:
            options = (f"--cka-memory-device={device}", "--cka-memory-report", *workers)
            finished_sessions[key] = session(TESTS, *options, forked=True)
        return finished_sessions[key]

    return run


@pytest.mark.predicts
def test_every_report_labels_its_figures_as_predicted(run_on, worker):
    """The table, the failure and the JSON file say so."""
    run = run_on("predict:cuda", *worker)
    run.assert_outcomes(passed=1, failed=2)
    assert run.region_of("test_keeps")["retained_bytes"] == 2**20
    head = run.report["session"]
    assert (head["device"], head["cuda"]) == ("predict:cuda:a100", None)
    assert head["device_name"] == "NVIDIA A100 80GB, predicted"
    assert head["meter"].startswith("predicted: ")
    run.result.stdout.fnmatch_lines(
        [
            "zero_retention broken: retained 1,048,576 bytes*",
            "  in the whole test, predicted for predict:cuda:a100 (predicted: fake tensors *",
            "device: predict:cuda:a100 (NVIDIA A100 80GB, predicted), *",
            "meter: predicted: *",
            "  PREDICTED, not measured: *",
        ]
    )


@pytest.mark.predicts
@pytest.mark.parametrize(
    ("device", "reported"),
    [
        ("predict:cuda", "predict:cuda:a100"),
        ("predict:cuda:a100-40gb", "predict:cuda:a100-40gb"),
        ("predict:cuda:h100", "predict:cuda:h100"),
    ],
)
def test_reports_name_the_predicted_card(run_on, device, reported):
    """Its full name is given so that figures of two cards are not confused."""
    run = run_on(device)
    assert run.report["session"]["device"] == reported


@pytest.mark.parametrize("source", [TESTS, "def test_it(): pass\n"], ids=["marked", "unmarked"])
@pytest.mark.parametrize("card", ["b9000", "a100:1", "A100"])
def test_unknown_card_ends_the_session(session, worker, source, card):
    """The error lists the known cards."""
    run = session(source, f"--cka-memory-device=predict:cuda:{card}", *worker, forked=bool(worker))
    run.assert_refused("--cka-memory-device: ", f"unknown card {card!r}", "a100, a100-40gb, h100")


@pytest.mark.parametrize("device", ["predict", "predict:cpu", "predict:cuda0"])
def test_only_cuda_can_be_predicted(session, device):
    """The error names the valid device."""
    run = session(TESTS, f"--cka-memory-device={device}")
    run.assert_refused(f"unknown device {device!r}", "predict:cuda")


@pytest.mark.predicts
def test_operation_that_cannot_be_predicted_fails_only_its_test(run_on):
    """The error names the line and says what to do."""
    run = run_on("predict:cuda")
    run.assert_outcomes(passed=1, failed=2)
    assert run.region_of("test_asks")["outcome"] == "failed"
    assert run.region_of("test_does_not")["outcome"] == "passed"
    run.result.stdout.fnmatch_lines(["E *PredictionError: *test_it.py:9 in test_asks: cannot*"])
