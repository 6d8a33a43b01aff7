"""The notebook runs, cell by cell, on the device that this machine has."""

import html
import re
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import forked_processes
import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "benchmarks" / "side_by_side.ipynb"


def printed(notebook: nbformat.NotebookNode) -> str:
    """Everything that its cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


@pytest.fixture
def execute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that runs a notebook in a new kernel, which has imported torch already."""
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)

    def execute(notebook: nbformat.NotebookNode) -> None:
        manager = AsyncKernelManager()
        command = [forked_processes.interpreter(), "-m", "ipykernel_launcher"]
        manager.kernel_spec.argv[:] = [*command, "-f", "{connection_file}"]
        resources = {"metadata": {"path": str(tmp_path)}}
        client = NotebookClient(notebook, km=manager, resources=resources)
        client.execute(cleanup_kc=True)  # otherwise a kernel that is given goes on

    return execute


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # nbclient and ipykernel warn
def test_notebook_shows_that_the_bundled_library_retains_nothing(monkeypatch, execute) -> None:
    """Run with 8 images, the notebook prints 0.00 MB for every row of the bundled library."""
    monkeypatch.setenv("CKA_NOTEBOOK_SAMPLES", "8")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    execute(notebook)
    lines = printed(notebook).splitlines()
    rows = [line for line in lines if re.match(r"\d+ +bundled cka", line)]
    assert len(rows) == 4
    assert all(line.endswith(" 0.00") for line in rows)


CELLS = """
import torch
from pytest_cka_memory import MemoryProbe
probe, KEPT = MemoryProbe("cpu"), []
---
with probe.measure() as region:
    KEPT.append(torch.ones(1000)[:10])
---
region.retained
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # nbclient and ipykernel warn
def test_notebook_shows_what_a_region_retains_as_a_table(execute) -> None:
    """A region in a notebook is shown as a table with the cell, its code and the advice."""
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in CELLS.split("---")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    execute(notebook)
    (output,) = notebook.cells[-1].outputs
    table = html.unescape(output["data"]["text/html"])
    has_columns = hasattr(CodeType, "co_positions")  # not in Python 3.10: then the whole line
    made = "torch.ones(1000)" if has_columns else "KEPT.append(torch.ones(1000)[:10])"
    assert f"<td>Cell In[2]:2 in <module>: `{made}`</td><td>__main__.KEPT[0]</td>" in table
    assert "keep a clone() instead of the tensor" in table
    assert "ipykernel" not in output["data"]["text/plain"]


def test_notebook_is_committed_with_its_output() -> None:
    """The committed notebook shows its figures and their
    machine to a reader who does not run it.
    """
    text = printed(nbformat.read(NOTEBOOK, as_version=4))
    assert "measured by" in text
    assert "bundled cka: retains 0.00 MB on average, 0.00 MB more with each batch" in text
