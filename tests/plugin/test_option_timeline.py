"""``--cka-memory-timeline``: memory over time in the page, of the tests that were asked for."""

import json
import re

import pytest

TESTS = """
import pytest
import torch

pytestmark = pytest.mark.max_peak_mb(1000)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_train(cka_memory):
    net = Net().to(cka_memory.device)
    with cka_memory.measure("step") as region:
        net(torch.ones(8, 32, device=cka_memory.device)).sum().backward()
    assert not hasattr(region, "peak_event")


def test_other(cka_memory):
    torch.ones(1000, device=cka_memory.device)
"""
OPTIONS = ("--cka-memory-html=r.html", "-p", "no:cacheprovider")


def drawn(pytester):
    """Return the data of the pictures in the page; None if it has none."""
    page = (pytester.path / "r.html").read_text("utf-8")
    found = re.search(r'id="tl-data">(.*?)</script>', page, re.DOTALL)
    return None if found is None else json.loads(found[1])


def total_at_peak(memory):
    """Return the sum of all bands at the peak."""
    sums = []
    for view in memory["views"].values():
        total = 0
        for runs in (memory["before"], *(runs for _, runs in view)):
            levels = [
                level
                for start, level in zip(runs[::2], runs[1::2], strict=True)
                if start <= memory["peak"]
            ]
            total += levels[-1] if levels else 0
        sums.append(total)
    return sums


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.native),
        pytest.param("emulate:cuda", marks=pytest.mark.emulates),
    ],
)
def test_bands_at_the_peak_add_up_to_the_peak_of_the_report(session, pytester, device):
    """On each device the bands add up, at the peak, to the region's peak to the byte."""
    run = session(TESTS, *OPTIONS, f"--cka-memory-device={device}", "--cka-memory-timeline",
                  forked=True)  # fmt: skip
    run.assert_outcomes(passed=2)
    peaks = {f"{r['nodeid']} {r['label']}".strip(): r["peak_bytes"] for r in run.regions}
    pictures = drawn(pytester)
    assert {picture["name"] for picture in pictures} == set(peaks)
    for picture in pictures:
        (memory,) = picture["memories"]  # an emulated device has no picture of the host
        assert total_at_peak(memory) == [peaks[picture["name"]]] * 2
        assert memory["unknown"] == 0


def test_report_as_json_is_the_same_with_the_option(session):
    """The JSON report has no field for the pictures."""
    run = session(TESTS, *OPTIONS, "--cka-memory-timeline", forked=True)
    assert not [key for region in run.regions for key in region if "memory_timeline" in key]


@pytest.mark.native
@pytest.mark.parametrize("pattern", ["train", "test_it.py::test_tr*"])
def test_pattern_chooses_tests(session, pytester, pattern):
    """A pattern is a part of a test's name, or matches all of it."""
    session(TESTS, *OPTIONS, f"--cka-memory-timeline={pattern}", forked=True)
    assert [picture["name"] for picture in drawn(pytester)] == ["test_it.py::test_train step"]


def test_page_has_no_picture_without_the_option(session, pytester):
    """Without the option nothing is recorded, and the page has neither its style nor its script."""
    run = session(TESTS, *OPTIONS, forked=True)
    run.assert_outcomes(passed=2)
    assert drawn(pytester) is None
    assert "tl-plot" not in (pytester.path / "r.html").read_text("utf-8")


def test_option_without_a_page_is_refused(session):
    """Without a page nothing would be drawn, so that is a usage error."""
    run = session(TESTS, "--cka-memory-timeline", "-p", "no:cacheprovider")
    run.assert_refused("--cka-memory-timeline: ", "add --cka-memory-html=PATH")


def test_file_that_was_taken_for_the_pattern_is_refused(session):
    """A file written behind the option would be its pattern, and pytest would run all tests."""
    run = session(TESTS, "--cka-memory-html=r.html", "--cka-memory-timeline", "test_it.py")
    run.assert_refused("'test_it.py' is a file or folder", "write the option after the files")


@pytest.mark.native
def test_pictures_travel_from_workers(session, pytester):
    """Pictures of tests that ran in workers are in the page too."""
    run = session(TESTS, *OPTIONS, "--cka-memory-timeline", "-n1", forked=True)
    run.assert_outcomes(passed=2)
    assert len(drawn(pytester)) == 2


def test_page_says_if_the_meter_records_nothing(session, pytester):
    """A meter that counts tensors records no blocks, and the page says why nothing is drawn."""
    pytester.makeconftest("import os\nos.environ['CKA_MEMORY_NATIVE'] = '0'")
    run = session(TESTS, *OPTIONS, "--cka-memory-device=cpu", "--cka-memory-timeline", forked=True)
    run.assert_outcomes(passed=2)
    assert drawn(pytester) is None
    page = (pytester.path / "r.html").read_text("utf-8")
    assert "Memory over time is not drawn: this meter counts tensors" in page
