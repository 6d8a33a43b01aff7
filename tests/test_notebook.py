"""The notebook is run, cell by cell, on whatever this machine has."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent / "benchmarks" / "side_by_side.ipynb"


def printed(notebook: nbformat.NotebookNode) -> str:
    """Everything its cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.filterwarnings("ignore")  # of the notebook machinery, not of ours
def test_the_notebook_runs_and_the_bundled_library_keeps_nothing(monkeypatch, tmp_path) -> None:
    """On few images: every cell runs, and what is printed is what the gates hold ours to."""
    monkeypatch.setenv("CKA_NOTEBOOK_SAMPLES", "64")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    lines = printed(notebook).splitlines()
    rows = [line for line in lines if re.match(r"\d+ +bundled cka", line)]
    assert len(rows) == 4
    assert all(line.endswith(" 0.00") for line in rows)


def test_the_notebook_is_committed_with_what_it_printed() -> None:
    """A reader sees figures without running it; they say which machine they are from."""
    text = printed(nbformat.read(NOTEBOOK, as_version=4))
    assert "measured by" in text
    assert "bundled cka: retains 0.00 MB on average, 0.00 MB more with each batch" in text
