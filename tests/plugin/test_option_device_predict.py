"""``--cka-memory-device=predict:cuda``: what is predicted is labelled so, everywhere."""

import pytest

pytest.importorskip("xdist")

WORKERS = pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "xdist"])

KEEPS = """
import pytest, torch
KEPT = []

@pytest.mark.zero_retention
def test_it(cka_memory):
    KEPT.append(torch.ones(2**20, dtype=torch.uint8, device=cka_memory.device))
"""


@pytest.mark.predicts
@WORKERS
def test_every_report_says_that_its_figures_are_predicted(session, workers):
    """The table, the failure and the JSON file."""
    run = session(
        KEEPS, "--cka-memory-device=predict:cuda", "--cka-memory-report", *workers, subprocess=True
    )
    run.outcomes(failed=1)
    assert run.region["retained_bytes"] == 2**20
    head = run.report["session"]
    assert (head["device"], head["cuda"]) == ("predict:cuda:a100", None)
    assert head["device_name"] == "NVIDIA A100 80GB, predicted"
    assert head["meter"].startswith("predicted: ")
    run.result.stdout.fnmatch_lines(
        [
            "zero_retention broken: retained 1,048,576 bytes*",
            "  in the whole test, on predict:cuda:a100 by predicted: fake tensors *",
            "device: predict:cuda:a100 (NVIDIA A100 80GB, predicted), *",
            "meter: predicted: *",
            "  PREDICTED, not measured: *",
        ]
    )


@pytest.mark.predicts
@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("predict:cuda", "predict:cuda:a100"),
        ("predict:cuda:a100-40gb", "predict:cuda:a100-40gb"),
        ("predict:cuda:h100", "predict:cuda:h100"),
    ],
)
def test_a_card_is_named_behind_the_device(session, named, told):
    """The report names it in full, so that figures of two cards are never taken for one's."""
    run = session(KEEPS, f"--cka-memory-device={named}", subprocess=True)
    assert run.report["session"]["device"] == told


@WORKERS
@pytest.mark.parametrize("source", [KEEPS, "def test_it(): pass\n"], ids=["marked", "unmarked"])
@pytest.mark.parametrize("card", ["b9000", "a100:1", "A100"])
def test_an_unknown_card_ends_the_session(session, workers, source, card):
    """As any device that is not there; the error lists the cards that are known."""
    run = session(source, f"--cka-memory-device=predict:cuda:{card}", *workers, subprocess=True)
    run.refused("--cka-memory-device: ", f"unknown card {card!r}", "a100, a100-40gb, h100")


@pytest.mark.parametrize("device", ["predict", "predict:cpu", "predict:cuda0"])
def test_nothing_but_cuda_is_predicted(session, device):
    """The error names what is."""
    run = session(KEEPS, f"--cka-memory-device={device}")
    run.refused(f"unknown device {device!r}", "predict:cuda")


@pytest.mark.predicts
def test_what_cannot_be_predicted_fails_its_test_alone(session):
    """With the line, and what to do."""
    run = session(
        """
        import torch
        def test_asks(cka_memory):
            assert torch.ones(3, device=cka_memory.device).sum().item() == 3
        def test_does_not(cka_memory):
            assert torch.ones(3, device=cka_memory.device).sum().ndim == 0
        """,
        "--cka-memory-device=predict:cuda",
        subprocess=True,
    )
    run.outcomes(passed=1, failed=1)
    run.result.stdout.fnmatch_lines(["E *PredictionError: *test_it.py:3 in test_asks: cannot*"])
