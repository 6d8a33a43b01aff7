"""The workflow shown in the docs calls the action as it is."""

import re

import pytest
from docs_pages import ROOT, blocks, prose

yaml = pytest.importorskip("yaml")
PAGE = ROOT / "docs" / "how-to" / "ci.md"
(SHOWN,) = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.language == "yaml"]
GATE, UPLOAD = SHOWN["steps"]
FOLDER = GATE["uses"].removeprefix("OWNER/pytest-cka-memory/").removesuffix("@COMMIT")
ACTION = yaml.safe_load((ROOT / FOLDER / "action.yml").read_text("utf-8"))


def test_gate_shown_uses_inputs_and_outputs_that_exist() -> None:
    """The inputs and outputs that the page's workflow uses are declared by the action."""
    assert set(GATE["with"]) <= set(ACTION["inputs"])
    lines = UPLOAD["with"]["path"].splitlines()
    used = [re.fullmatch(r"\$\{\{ steps\.gate\.outputs\.([\w-]+) \}\}", line) for line in lines]
    assert [found and found[1] for found in used] == ["json", "html"]
    assert {"json", "html"} <= set(ACTION["outputs"])
    assert UPLOAD["uses"] in (ROOT / ".github" / "workflows" / "gpu.yml").read_text("utf-8")


def test_page_describes_every_input_and_output() -> None:
    """The page has a row for every input of the action and no other, and it names every output."""
    rows = re.findall(r"^\| `([\w-]+)` \|", prose(PAGE), re.MULTILINE)
    assert sorted(rows) == sorted(ACTION["inputs"])
    assert all(f"`{output}`" in prose(PAGE) for output in ACTION["outputs"])
