"""Statements in the text of the pages, which no block shows, are true of the code."""

import argparse
import importlib
import os
import pkgutil
import re
import tempfile
from pathlib import Path

import pytest
from docs_pages import ROOT, pages, prose

from emulated_cuda import running, triton
from emulated_cuda.cards import CARDS
from emulated_cuda.loading.loaded import folder_of_driver
from emulated_cuda.triton.ttir import OPERATIONS
from emulated_cuda.values import equivalents
from emulated_cuda.values.equivalents import EQUIVALENTS
from pytest_cka_memory.cli.main import _parser as cli_parser
from pytest_cka_memory.core.markers import MARKERS
from pytest_cka_memory.reports.html import page as html_page
from pytest_cka_memory.reports.markdown import COMMENT_CHARACTERS

PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
DOCS = ROOT / "docs"


def text(page: Path) -> str:
    """Return a page without blocks and line breaks."""
    return " ".join(prose(page).split())


@pytest.mark.slow
def test_markers_that_take_no_scope_are_the_ones_that_the_page_names(
    pytester: pytest.Pytester,
) -> None:
    """Each marker takes a scope, or is named on the page as one that does not."""
    (named,) = re.findall(
        r"Limits on a figure \(all but (.+?)\)", text(DOCS / "reference/markers.md")
    )
    refused = set()
    for name, marker in MARKERS.items():
        inside = marker.example.partition("(")[2].rstrip(")")
        arguments = ", ".join(filter(None, [inside, "scope='class'", "warn=True"]))
        pytester.makepyfile(
            f"import pytest\nclass TestIt:\n"
            f"    @pytest.mark.{name}({arguments})\n    def test_it(self): pass\n"
        )
        done = pytester.runpytest_inprocess("--cka-memory-device=cpu", "-p", "no:cacheprovider")
        printed = done.stdout.str() + done.stderr.str()
        if "leave out scope=" in printed:
            refused.add(name)
        else:
            assert done.ret == 0, printed
    assert refused == set(re.findall(r"`(\w+)`", named))


def test_folder_of_the_emulated_driver_is_the_one_that_security_describes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page says its name, that it has two links, and that only its user may write there."""
    page = text(ROOT / "SECURITY.md")
    (described,) = re.findall(r"a folder `([\w-]+)-…` in the temporary folder, with two", page)
    assert "only that user may write into it, and it stays" in page
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = folder_of_driver("/lib/driver.so")
    assert folder.parent == tmp_path
    assert folder.name.startswith(described.replace("UID", str(os.getuid())))
    assert [path.is_symlink() for path in folder.iterdir()] == [True, True]
    assert not folder.stat().st_mode & 0o022
    assert folder_of_driver("/lib/driver.so") == folder


@pytest.mark.sources
def test_contributing_describes_every_folder_of_tests() -> None:
    """The table has a row for each folder with files of Python below tests, and for no other."""
    rows = re.findall(r"^\| `(tests/\w+)` \|", prose(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    assert sorted(rows) == sorted(f"tests/{name}" for name in folders)


@pytest.mark.sources
def test_modules_with_private_names_of_torch_are_named() -> None:
    """CONTRIBUTING names each module that is there for private names of torch."""
    (named,) = re.findall(
        r"Private names of torch are used in three modules only, (.+?)\. ",
        text(ROOT / "CONTRIBUTING.md"),
    )
    found = [
        path
        for package in ("pytest_cka_memory", "emulated_cuda", "cka")
        for pattern in ("torch_private.py", "torch_keepers.py")
        for path in (ROOT / package).rglob(pattern)
    ]
    assert len(found) == 3
    assert {path.name for path in found} == {
        Path(each).name for each in re.findall(r"`(\S+?)`", named)
    }


@pytest.mark.sources
def test_oldest_versions_are_those_that_the_project_requires() -> None:
    """README and the page on versions name the versions of pyproject.toml."""
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', PROJECT)
    (pytest_version,) = re.findall(r'"pytest>=([\d.]+)"', PROJECT)
    (torch,) = re.findall(r'"torch>=([\d.]+)"', PROJECT)
    expected = f"Python {python}, PyTorch {torch} and pytest {pytest_version}"
    assert expected in text(ROOT / "README.md")
    assert expected in text(DOCS / "reference/versions.md")
    assert f"PyTorch ({torch} or newer" in text(DOCS / "how-to/emulating.md")


@pytest.mark.sources
def test_extras_that_pages_name_exist() -> None:
    """Each ``pytest-cka-memory[...]`` and each "the extra `...`" is an extra in pyproject.toml."""
    known = set(
        re.findall(r"^(\w+) = \[", PROJECT.partition("optional-dependencies]")[2], re.MULTILINE)
    )
    for page in pages():
        whole = page.read_text("utf-8")
        named = re.findall(r"(?:pytest-cka-memory|\.)\[([a-z,]+)\]|[Ee]xtra `(\w+)`", whole)
        assert {
            name for pair in named for each in pair for name in each.split(",") if name
        } <= known


def test_cards_of_the_settings_are_all_cards() -> None:
    """The page on emulated tests lists every card."""
    (listed,) = re.findall(r"another card: (.+?)\. ", text(DOCS / "how-to/emulating.md"))
    assert set(listed.split(", ")) == set(CARDS)


@pytest.mark.sources
def test_faults_and_ends_are_as_many_as_the_page_says() -> None:
    """The numbers on the page on trust are those of the tests in tests/faults."""
    sources = [path.read_text("utf-8") for path in (ROOT / "tests/faults").glob("faulty*.py")]
    faults = sum(len(re.findall(r"^class Test\w+", source, re.MULTILINE)) for source in sources)
    page = text(DOCS / "explanation/trust.md")
    assert f"sessions with {faults} kinds of fault" in page


def test_numbers_that_limit_reports_are_those_of_the_code() -> None:
    """Pages say how much of a session each report has at most."""
    assert f"at most {COMMENT_CHARACTERS:,} characters" in text(DOCS / "reference/options.md")
    assert f"at most {COMMENT_CHARACTERS:,} characters" in text(DOCS / "how-to/reports.md")
    assert f"{html_page._MOST_DRAWN} regions are drawn at most" in text(DOCS / "how-to/timeline.md")


def test_tables_of_the_emulated_device_have_as_many_rows_as_the_page_says() -> None:
    """The page counts the operations of Triton and the operators that only CUDA has."""
    pytest.importorskip("triton")
    for package in (triton, equivalents):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    page = text(DOCS / "explanation/values.md")
    assert f"`emulated_cuda/triton` has {len(OPERATIONS)} operations" in page
    assert f"The table of equivalents has {len(EQUIVALENTS)} operators" in page


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Return every option of a command and of the commands below it."""
    found = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {option for each in action.choices.values() for option in _options(each)}
    return found


def test_commands_in_the_text_have_the_options_that_they_are_shown_with() -> None:
    """Each ``python -m ...`` in a sentence has commands and options that exist."""
    plugin, device = cli_parser(), running.parser()
    (commands,) = [a for a in plugin._actions if isinstance(a, argparse._SubParsersAction)]
    seen = 0
    for page in pages():
        for command in re.findall(
            r"`python -m (pytest_cka_memory|emulated_cuda)\b([^`]*)`", text(page)
        ):
            module, words = command[0], re.split(r"(?<=\.py) ", command[1])[0].split()
            known = _options(plugin if module == "pytest_cka_memory" else device)
            given = {word for word in words if word.startswith("--")}
            assert given <= known, (page, command)
            if module == "pytest_cka_memory" and words and not words[0].startswith("-"):
                assert words[0] in {*commands.choices, "COMMAND"}, (page, command)
            seen += 1
    assert seen > 10
