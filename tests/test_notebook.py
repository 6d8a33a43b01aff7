"""The notebook runs, cell by cell, on the device that this machine has."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent / "benchmarks" / "side_by_side.ipynb"


def printed(notebook: nbformat.NotebookNode) -> str:
    """Everything that its cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


@pytest.mark.filterwarnings("ignore")  # nbclient and ipykernel warn
def test_notebook_shows_that_the_bundled_library_retains_nothing(monkeypatch, tmp_path) -> None:
    """With 64 images; every row of the bundled library ends with 0.00 MB."""
    monkeypatch.setenv("CKA_NOTEBOOK_SAMPLES", "64")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    lines = printed(notebook).splitlines()
    rows = [line for line in lines if re.match(r"\d+ +bundled cka", line)]
    assert len(rows) == 4
    assert all(line.endswith(" 0.00") for line in rows)


def test_notebook_is_committed_with_its_output() -> None:
    """A reader sees figures, and the machine they are from, without running it."""
    text = printed(nbformat.read(NOTEBOOK, as_version=4))
    assert "measured by" in text
    assert "bundled cka: retains 0.00 MB on average, 0.00 MB more with each batch" in text
