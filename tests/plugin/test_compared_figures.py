"""A test that compares the figures of its regions itself is told what holds the memory, too."""

from types import CodeType

import pytest

SOURCE = """
import unittest
import torch

KEPT = []

def check(region):
    assert region.growth_bytes_per_batch == 0

def test_retained(cka_memory):
    with cka_memory.measure("train") as region:
        ones = torch.ones(1000)
    assert region.retained_mb == 0

def test_growth_in_a_helper(cka_memory):
    with cka_memory.measure("loop") as region:
        for batch in region.batches([torch.ones(100)] * 8):
            KEPT.append(batch * 2)
    check(region)

def test_peak(cka_memory):
    with cka_memory.measure("peak") as region:
        torch.ones(2**18)
    assert region.peak_increase_mb < 1, "too much"

def test_sweep(cka_memory):
    def keep(loader):
        KEPT.extend(batch + 1 for batch in loader)
    sweep = cka_memory.sweep(keep, [torch.ones(100)] * 16)
    assert sweep.growth_over_batch_counts_mb == 0

def test_another_comparison(cka_memory):
    with cka_memory.measure("unrelated") as region:
        ones = torch.ones(1000)
    print(region.retained_mb)
    torch.testing.assert_close(ones, ones + 1)

def test_another_error(cka_memory):
    with cka_memory.measure("unrelated") as region:
        ones = torch.ones(1000)
    raise ValueError(region.retained_mb)

def test_of_nothing_retained(cka_memory):
    with cka_memory.measure("unrelated") as region:
        pass
    assert region.retained_bytes == 1

def test_kept(cka_memory):
    with cka_memory.measure("unrelated") as region:
        ones = torch.ones(1000)
    assert region.retained_bytes == 4000
"""
UNITTEST = """
import unittest
import pytest
import torch

class TestCase(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def probe(self, cka_memory):
        self.cka_memory = cka_memory

    def test_method(self):
        with self.cka_memory.measure("of a method") as region:
            ones = torch.ones(1000)
        self.assertEqual(region.retained_bytes, 0)
"""


@pytest.mark.slow
@pytest.mark.native
def test_failed_comparison_names_line_and_holder_of_what_it_compared(session):
    """If a test compares a figure, its failure has the line and the holder of what was measured."""
    run = session(SOURCE, "--cka-memory-device=cpu")
    run.assert_outcomes(passed=1, failed=7)
    run.result.stdout.fnmatch_lines(
        [
            "E * where 0.00381* = <Region 'train': peak increase 3.9 KB, retained 3.9 KB>.reta*",
            "*- cka-memory -*",
            "retained 4,000 bytes",
            "  in region 'train', measured on cpu (torch's CPU allocator)",
            "  1 tensor, 4,000 bytes, float32 (1000,)",
            "    made at *",
            "    held by ones in test_retained (test_it.py:12)",
            "growth per batch 400 bytes",
            "  in region 'loop', measured on cpu (torch's CPU allocator)",
            "    held by test_it.KEPT[[]0]",
            "E * AssertionError: too much",
            "peak increase 1,048,576 bytes (1.00 MB)",
            "  live at the peak:",
            "    made at *",
            "E * = <Sweep over 1, 2, 4, 8, 16 batches: retained 400 B, *>.growth_over_batch_*",
            "retained 6,400 bytes",
            "and 2 smaller figures of other regions",
        ],
    )
    assert run.text.count("- cka-memory -") == 4, "only where figures were compared"
    words = " ".join(run.text.split())
    # In Python 3.10 the whole line is shown.
    before = "" if hasattr(CodeType, "co_positions") else "ones = "
    assert f"test_it.py:11 in test_retained: `{before}torch.ones(1000)`" in words
    assert "test_it.py:22 in test_peak: `torch.ones(2**18)`" in words
    retained = run.region_of("test_retained")["retained"]
    assert [holding["held_by"] for holding in retained] == ["ones in test_retained (test_it.py:12)"]


def test_failed_comparison_of_a_unittest_method_is_explained(session):
    """A failed comparison in a unittest method is explained, though unittest's frame raises."""
    run = session(UNITTEST, "--cka-memory-device=cpu", "--tb=short")
    run.assert_outcomes(failed=1)
    run.result.stdout.fnmatch_lines(
        ["*- cka-memory -*", "retained 4,000 bytes", "    held by ones in test_method (test_it.py*"]
    )
