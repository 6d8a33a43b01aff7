"""What README and docs refer to exists: files, headings, options."""

import re
from pathlib import Path

import pytest
from docs_pages import ROOT, anchors, blocks, links, name_of, pages, prose

from pytest_cka_memory.plugin import add_options

PAGES = pytest.mark.parametrize("page", pages(), ids=name_of)
_PATH = re.compile(r"`((?:tests|docs|cka|pytest_cka_memory|\.ci|\.github)/[\w./-]*)`")
_OPTION = re.compile(r"--cka-memory(?:-[a-z]+)+")


@PAGES
@pytest.mark.sources
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    """Every relative link on a page leads to a file and heading;
    links to the web are not followed.
    """
    broken = []
    for link in links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@PAGES
@pytest.mark.sources
def test_paths_in_backticks_exist(page: Path) -> None:
    """A path in backticks names a file or folder of the checkout, or one that
    the page has its reader write.
    """
    files = [Path(block.note.removeprefix("file: ")) for block in blocks(page)]
    own = {path.as_posix() for file in files for path in (file, *file.parents)}
    named = set(_PATH.findall(prose(page))) - own
    assert [path for path in named if not (ROOT / path).exists()] == []


@PAGES
def test_options_in_text_and_commands_exist(page: Path) -> None:
    """Every ``--cka-memory-...`` on a page is an option of the plugin."""
    assert set(_OPTION.findall(page.read_text("utf-8"))) <= options()


def options() -> set[str]:
    """Every option that the plugin declares, without its values."""
    parser = pytest.Parser(_ispytest=True)
    add_options(parser)
    names = (
        name for group in parser._groups for option in group.options for name in option.names()
    )
    return {name.partition("=")[0] for name in names}


def test_readme_has_between_60_and_130_lines() -> None:
    """The README is for newcomers; details belong in the docs."""
    assert 60 <= len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130


def test_list_of_pages_has_every_page() -> None:
    """docs/README.md links to every page, because nobody finds a page without a link to it."""
    contents = ROOT / "docs" / "README.md"
    linked = {(contents.parent / link.partition("#")[0]).resolve() for link in links(contents)}
    of_the_site = {name_of(page) for page in (ROOT / "docs" / "project").glob("*.md")}
    others = {"README.md", "docs/README.md", *of_the_site}
    assert {name_of(page) for page in pages() if page not in linked} == others
    assert contents in {(ROOT / link).resolve() for link in links(ROOT / "README.md")}


def test_every_block_is_fenced_and_has_a_language() -> None:
    """Every code block of a page has a fence and a language;
    others would not be run or compared.
    """
    unnamed = [str(block) for page in pages() for block in blocks(page) if not block.language]
    assert unnamed == []
    fences = [re.findall(r"^ *```", page.read_text("utf-8"), re.MULTILINE) for page in pages()]
    assert sum(map(len, fences)) == 2 * sum(len(blocks(page)) for page in pages())
    assert [page for page in pages() if re.search(r"\n\n    \S", prose(page))] == []


def test_notes_name_tests_that_exist() -> None:
    """A note above a block that is not run names a test file that exists."""
    notes = " ".join(block.note for page in pages() for block in blocks(page))
    named = re.findall(r"(?:tests|\.ci)/[\w./]*\w", notes)
    assert named
    own = {block.note.removeprefix("file: ") for page in pages() for block in blocks(page)}
    assert [path for path in named if path not in own and not (ROOT / path).exists()] == []
