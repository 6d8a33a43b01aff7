"""A session's report files name no folder outside the root, where its leaks were allocated."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

LIBRARY = """
import torch
KEPT = {}
def keep(name):
    KEPT[name] = torch.ones(64)
"""
SOURCE = """
import pytest
import {first}, {second}

@pytest.mark.zero_retention
def test_outside(cka_memory, tmp_path):
    with cka_memory.measure(f"reads {{tmp_path}}/data.pt"):
        {first}.keep(str(tmp_path / "data.pt"))

@pytest.mark.zero_retention
def test_installed():
    {second}.keep("b")

@pytest.mark.zero_retention
@pytest.mark.parametrize("path", [{folder!r}])
def test_parameter(path):
    {first}.keep("c")
"""


def test_files_name_no_folder_of_the_machine(session, tmp_path, monkeypatch):
    """No file names a folder of the machine, in frames, holders, labels, parameters or messages.

    This holds for JSON, HTML, Markdown, JUnit and GitHub.
    """
    outside, installed = tmp_path / "alices", tmp_path / "alices" / "site-packages" / "shop"
    installed.mkdir(parents=True)
    (outside / "outside_it.py").write_text(LIBRARY, "utf-8")
    (installed / "__init__.py").write_text("", "utf-8")
    (installed / "layers.py").write_text(LIBRARY, "utf-8")
    monkeypatch.setattr(sys, "path", [str(outside), str(installed.parent), *sys.path])
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    source = SOURCE.format(first="outside_it", second="shop.layers", folder=str(outside / "x"))
    names = {kind: f"report.{kind}" for kind in ("html", "markdown")}
    run = session(
        source.replace("import outside_it, shop.layers", "import outside_it\nimport shop.layers"),
        "--cka-memory-device=cpu", "--junitxml=junit.xml", "--cka-memory-github=yes",
        *(f"--cka-memory-{kind}={name}" for kind, name in names.items()),
    )  # fmt: skip
    run.assert_outcomes(failed=3)
    root = Path.cwd()
    texts = [(root / name).read_text("utf-8") for name in ("r.json", *names.values())]
    texts += [summary.read_text("utf-8"), *re.findall(r"^::error.*", run.text, re.MULTILINE)]
    texts += _properties(root / "junit.xml")
    assert len(texts) > 4 + 3 + 3 * 5
    for text in texts:
        assert str(tmp_path) not in text
        assert "alices" not in text
        assert str(root) not in text
    places = [holding["created_at"][0] for region in run.regions for holding in region["retained"]]
    assert places == ["…/outside_it.py:5 in keep", "shop/layers.py:5 in keep", places[0]]
    assert run.regions[0]["label"] == "reads …/data.pt"
    assert run.regions[0]["retained"][0]["held_by"].startswith("outside_it.KEPT['…/")


def _properties(file: Path) -> list[str]:
    found = ElementTree.parse(file).iter("property")
    return [str(element.attrib) for element in found]
