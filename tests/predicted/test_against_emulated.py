"""Holds predictions to torch's CUDA build, which runs on an emulated device without a GPU."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "benchmarks" / "predicted_vs_emulated.py"
(COMMITTED,) = (SCRIPT.parent / "results").glob("against-emulated-*.json")

KNOWN: dict[str, dict[str, tuple[int, int]]] = {
    "eight kept losses, mse_loss": {"peak increase": (9_438_208, 9_437_184)},
    "eight kept losses, smooth_l1_loss": {"peak increase": (9_438_208, 9_437_184)},
    "eight kept losses, soft_margin_loss": {
        "peak increase": (8_390_144, 8_388_608),
        "reserve": (10_485_760, 8_388_608),
    },
    "eight kept losses, huber_loss": {"peak increase": (1_053_696, 1_052_672)},
    "eight kept losses, l1_loss": {"peak increase": (2_102_272, 2_101_248)},
    "eight kept losses, binary_cross_entropy_with_logits": {
        "peak increase": (2_102_272, 2_101_248)
    },
    "eight kept losses, binary_cross_entropy": {
        "peak increase": (8_390_144, 8_388_608),
        "reserve": (10_485_760, 8_388_608),
    },
    "convolutional net, forward": {"peak increase": (8_462_848, 6_291_456)},
    "convolutional net with batch norm, training step, SGD": {
        "peak increase": (18_405_376, 12_727_808)
    },
    "attention, forward and backward": {
        "peak increase": (14_780_416, 33_686_528),
        "reserve": (23_068_672, 44_040_192),
    },
    "encoder layer of a transformer, evaluation": {
        "peak increase": (3_670_016, 524_288),
        "reserve": (25_165_824, 0),
    },
    "encoder layer of a transformer, training": {
        "peak increase": (17_459_200, 20_326_400),
        "reserve": (29_360_128, 31_457_280),
    },
    "bilinear": {"peak increase": (8_532_480, 8_523_776)},
}
"""Program -> figure -> emulated and predicted bytes. All other figures are the same."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Return the script that compares the two devices, as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module(SCRIPT.stem)


@pytest.fixture(scope="module")
def found(script: ModuleType, emulation: None) -> Any:
    """Return the figures of both devices."""
    return script.measure_both()


@pytest.mark.emulates
@pytest.mark.predicts
def test_predictions_differ_from_the_emulated_device_only_as_known(script, found):
    """A difference that disappears or changes its size fails as well, so that it is noticed."""
    differences = script.differences(found)
    assert {name: one for name, one in differences.items() if one} == KNOWN
    assert len(differences) > 2 * len(KNOWN)


@pytest.mark.emulates
@pytest.mark.predicts
def test_every_start_retained_and_net_is_predicted_exactly(script, found):
    """Only what is allocated during a program can differ, not what it leaves."""
    for different in script.differences(found).values():
        assert set(different) <= {"peak increase", "reserve"}


def test_docs_show_the_committed_comparison(script):
    """The committed figures are those that the first test expects, and the page's table."""
    committed = json.loads(COMMITTED.read_text("utf-8"))
    differences = script.differences(committed)
    assert {name: one for name, one in differences.items() if one} == KNOWN
    page = ROOT / "docs" / "explanation" / "trust.md"
    assert script.table(committed) in page.read_text("utf-8")
