"""Warnings of a session on an emulated device: in the header or the summary, and in reports."""

import os

import pytest
import torch

from emulated_cuda import torch_versions
from emulated_cuda.errors import WITHOUT_VALUES as REMEDY

pytestmark = pytest.mark.emulates


@pytest.mark.parametrize(
    ("value", "warned"),
    [("1", 2), ("True", 2), ("0", 0), (None, 0)],
    ids=["1", "true", "0", "unset"],
)
def test_session_whose_triton_kernels_are_interpreted_is_warned(
    session, monkeypatch, value, warned
):
    """Interpreted Triton kernels are warned about once in the header and once in the report."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    device = "--cka-memory-device=emulate:cuda:t4"
    run = session("def test_it(cka_memory): pass", device, "--cka-memory-report", forked=True)
    run.assert_outcomes(passed=1)
    assert run.text.count("warning: TRITON_INTERPRET is set, and Triton's interpreter") == warned


LACKING = """
from emulated_cuda import torch_versions

torch_versions.NEEDED_NAMES = torch_versions.Row(("torch.planted.name",), "not in any version")
"""
WITHOUT_VALUES = (
    f"warning: no values are computed: torch {torch.__version__} lacks torch.planted.name, and "
    "the emulated device needs them to compute values; install a tested version (torch "
    f"{torch_versions.RANGE}), or {REMEDY}"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conftest", "options", "in_header", "times"),
    [
        ("import torch", (), True, 1),
        ("", (), False, 1),
        ("import torch", ("--cka-memory-report",), True, 2),
        ("", ("--cka-memory-report",), False, 1),
        ("", ("-n1",), False, 1),
    ],
    ids=["torch-before", "torch-later", "table-torch-before", "table", "worker"],
)
def test_session_without_values_because_torch_lacks_a_name_is_warned(
    session, pytester, monkeypatch, conftest, options, in_header, times
):
    """If torch lacks a name to compute values, each report warns, and so does the header or
    summary. The summary does so if torch was not imported before the header.
    """
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    pytester.makepyfile(lacking=LACKING)
    pytester.makeconftest(conftest)
    options = ("-p", "lacking", "--cka-memory-device=emulate:cuda:t4", *options)
    has_torch = bool(conftest)  # as a forked session has from its start on
    how = {"forked": has_torch, "subprocess": not has_torch}
    run = session("def test_it(cka_memory): pass", *options, **how)
    run.assert_outcomes(passed=1)
    header = " ".join(run.text.partition("test session starts")[2].partition("plugins:")[0].split())
    text = " ".join(run.text.split())
    assert text.count(WITHOUT_VALUES) == times
    assert (WITHOUT_VALUES in header) == in_header
    assert WITHOUT_VALUES in run.report["session"]["notes"]


def test_session_that_wants_no_values_is_not_warned_of_a_name_that_torch_lacks(
    session, pytester, monkeypatch
):
    """With ``values=off``, as the warning advises, no name that torch lacks is warned about."""
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    pytester.makepyfile(lacking=LACKING)
    device = "--cka-memory-device=emulate:cuda:t4,values=off"
    run = session("def test_it(cka_memory): pass", "-p", "lacking", device, forked=True)
    run.assert_outcomes(passed=1)
    assert "torch.planted.name" not in run.text
    assert not [note for note in run.report["session"]["notes"] if note.startswith("warning")]
