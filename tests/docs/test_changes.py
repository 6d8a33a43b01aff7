"""The files in docs/project/changes: their names, their text, and what a release makes of them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import CHANGES, ROOT, anchors, block_noted, links

FRAGMENTS = sorted(CHANGES.glob("*.md"))
KINDS = ("added", "changed", "fixed", "removed")


def faults(fragment: Path, text: str) -> list[str]:
    """What is wrong with a file of changes."""
    found = []
    if not re.fullmatch(rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md", fragment.name):
        found.append("name: words in small letters with hyphens, a dot, the kind, .md")
    if not re.match(r"\*\*[^*\n]+\*\*", text):
        found.append("text: start with a bold phrase")
    if "\n\n" in text or "```" in text:
        found.append("text: write one paragraph without blocks of code")
    if not text.endswith((".\n", ")\n")):
        found.append("text: end with a full stop or a link, and a line break")
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text.replace("**", ""))
    if len(re.findall(r"[.!?](?=\s+[A-Z\[]|\s*$)", plain)) > 4:  # the bold phrase may be one
        found.append("text: write one to three sentences")
    return found


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.name)
def test_change_is_well_formed(fragment):
    """A file of changes has a valid name, and one paragraph of a few sentences."""
    assert faults(fragment, fragment.read_text("utf-8")) == []


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.name)
def test_links_of_a_change_are_relative_to_the_root(fragment):
    """A release moves the text into CHANGELOG.md, where its links must lead to files."""
    for link in links(fragment):
        path, _, anchor = link.partition("#")
        if not link.startswith("https://"):
            assert (ROOT / path).is_file(), link
            assert not anchor or anchor in anchors(ROOT / path), link


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Largest.added.md", "**A.** Text.\n"),
        ("largest.new.md", "**A.** Text.\n"),
        ("largest.md", "**A.** Text.\n"),
        ("largest.added.md", "Text.\n"),
        ("largest.added.md", "**A.** Text.\n\nMore.\n"),
        ("largest.added.md", "**A.** Text"),
        ("largest.added.md", "**A.** One. Two. Three. Four.\n"),
    ],
)
def test_malformed_change_is_found(name, text):
    """Each rule for files of changes refuses what breaks it."""
    assert len(faults(Path(name), text)) == 1


def test_example_in_contributing_is_well_formed():
    """CONTRIBUTING shows a file of changes that the rules accept."""
    example = block_noted("checked by: tests/docs/test_changes.py")
    assert faults(Path("largest-batch.added.md"), example.text) == []


def test_folder_has_nothing_but_changes_and_their_template():
    """A file with another ending would never reach the changelog."""
    others = [path.name for path in CHANGES.iterdir() if path not in FRAGMENTS]
    assert set(others) <= {"template.md.jinja", ".gitkeep"}


def test_release_moves_changes_into_the_changelog_and_keeps_what_it_has(tmp_path):
    """A release writes every change under its kind and loses no line of the changelog."""
    pytest.importorskip("towncrier", reason="needs towncrier, which the extra dev installs")
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    start, _, end = (tmp_path / "CHANGELOG.md").read_text("utf-8").partition("## ")
    folder = shutil.copytree(CHANGES, tmp_path / "docs" / "project" / "changes")
    for kind in KINDS:
        (folder / f"example.{kind}.md").write_text(f"**Example of {kind}.** Text of it.\n")
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", "99.0.0"]
    subprocess.run([*command, "--date", "2030-01-02"], cwd=tmp_path, check=True)

    after = (tmp_path / "CHANGELOG.md").read_text("utf-8")
    assert after.startswith(f"{start}## 99.0.0 (2030-01-02)\n\n### Added\n\n- **")
    assert after.endswith(f"\n\n## {end}")
    new = after.removeprefix(start).removesuffix(f"## {end}")
    assert re.findall(r"^### (.+)$", new, re.MULTILINE) == [kind.capitalize() for kind in KINDS]
    assert "\n\n\n" not in new
    words = " ".join(new.split())
    for kind in KINDS:
        section = words.split(f"### {kind.capitalize()} ")[1].split("### ")[0]
        assert f"- **Example of {kind}.** Text of it." in section
    for fragment in FRAGMENTS:
        assert " ".join(fragment.read_text("utf-8").split()) in words
    assert not list(folder.glob("*.md"))
