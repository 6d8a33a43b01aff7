"""The pictures in docs/architecture.md are those that the imports are checked against."""

import ast
from pathlib import Path

import pytest
from docs_pages import ROOT, blocks

PAGE = ROOT / "docs" / "architecture.md"


def pictures() -> list[str]:
    """Return the pictures of tests/test_layering.py, without their indentation."""
    tree = ast.parse((ROOT / "tests" / "test_layering.py").read_text("utf-8"))
    (value,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PICTURES"
    ]
    return [
        "\n".join(line.strip() for line in text.strip().splitlines())
        for text in ast.literal_eval(value).values()
    ]


@pytest.mark.parametrize("number", [0, 1, 2], ids=["pytest_cka_memory", "emulated_cuda", "cka"])
def test_page_shows_the_levels_that_imports_are_checked_against(number: int) -> None:
    """The page's picture of the levels equals the table against which imports are checked."""
    shown = [block.text.strip() for block in blocks(PAGE) if block.language == "text"]
    assert shown[number] == pictures()[number]


@pytest.mark.sources
@pytest.mark.parametrize("package", ["pytest_cka_memory", "emulated_cuda"])
def test_page_describes_every_folder(package: str) -> None:
    """The page's tables have a row for every folder of the packages."""
    folders = [path for path in Path(ROOT / package).iterdir() if path.is_dir()]
    names = {path.name for path in folders if any(path.glob("*.py"))}
    rows = {line.split("`")[1] for line in PAGE.read_text("utf-8").splitlines() if "| `" in line}
    assert names <= rows
