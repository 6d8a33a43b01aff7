"""The reference pages are complete: every option, marker, figure and key is on its page."""

import re

import pytest
from docs_pages import ROOT, prose
from test_links import options

import cka
import emulated_cuda
from emulated_cuda import running
from emulated_cuda.cards import CARDS
from emulated_cuda.loading.records import DeviceUse, ProcessUse
from pytest_cka_memory import MemoryProbe, Region
from pytest_cka_memory.__main__ import main
from pytest_cka_memory.cli.main import _parser
from pytest_cka_memory.core.markers import MARKERS

REFERENCE = ROOT / "docs" / "reference"


def rows(name: str) -> set[str]:
    """Every name in backticks in the first column of a page's tables."""
    cells = re.findall(r"^\| (.+?) \|", prose(REFERENCE / f"{name}.md"), re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}


def test_options_are_all_described() -> None:
    """The page has a row for every option of the plugin and no row for any other option."""
    assert {row.partition("=")[0] for row in rows("options")} == options()


def test_markers_are_all_described() -> None:
    """The page has a row for every marker and no row for any other marker."""
    page = prose(REFERENCE / "markers.md")
    cells = re.findall(r"^\| `(\w+)(?:\(.*?\))?` \|", page, re.MULTILINE)
    assert sorted(cells) == sorted(MARKERS)


def test_methods_and_figures_of_the_fixture_are_all_described() -> None:
    """Each public attribute of a probe or region has a row; of the sizes, those in bytes."""
    text = (REFERENCE / "fixture.md").read_text("utf-8")
    found = {name for name in dir(MemoryProbe) if not name.startswith("_")}
    assert [
        name
        for name in found - {"end_open", "explain_compared", "forget_from"}
        if f"`cka_memory.{name}" not in text
    ] == []
    attributes = {*dir(Region), *Region.__annotations__}
    public = {name for name in attributes if not name.startswith("_") and "_mb" not in name}
    missing = [name for name in public if f"`{name}`" not in text and f"`region.{name}" not in text]
    assert missing == []


def test_keys_of_the_json_report_are_all_described(capsys: pytest.CaptureFixture[str]) -> None:
    """The page describes every key of the JSON report and no other key."""
    import json

    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    objects = [schema, *schema["$defs"].values()]
    keys = {key for found in objects for key in found["properties"]} - {"reason"}
    assert rows("json") - {"pytest-cka-memory/1"} == keys


def test_commands_and_their_options_are_all_described() -> None:
    """The page has each command of ``python -m pytest_cka_memory``, and each option of it."""
    (commands,) = [action for action in _parser()._actions if hasattr(action, "_name_parser_map")]
    text = (REFERENCE / "command-line.md").read_text("utf-8")
    described = {word for name in rows("command-line") for word in name.split()[:1]}
    options = set(re.findall(r"^\| `(\w+)` \| `(--[a-z-]+)", text, re.MULTILINE))
    assert set(commands.choices) <= described
    assert options == {
        (name, option)
        for name, parser in commands.choices.items()
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }


def test_command_line_of_the_emulated_device_is_described() -> None:
    """The page has every option, field, function, error and card of the command, and no others."""
    text = (REFERENCE / "emulated_cuda.md").read_text("utf-8")
    parser = running.parser()
    usage = parser.format_usage().removeprefix("usage: ").strip()
    assert f"```text\n{usage}\n```" in text
    given = {option for action in parser._actions for option in action.option_strings}
    names = {row.partition(" ")[0].partition("(")[0] for row in rows("emulated_cuda")}
    described = {name for name in names if name.startswith("-")}
    assert described == given - {"-h", "--help", "-m"}
    process = ProcessUse(1, "train.py", 0, CARDS["t4"], 2**30, True, (DeviceUse(0, 1, 0, 1, None),))
    fields = set(running.rows([process])[0])
    names -= described | {"RuntimeError", "IndexError"}
    assert names == {*fields, *CARDS, *emulated_cuda.__all__}
    for name, card in CARDS.items():
        gib, (major, minor) = card.total_bytes / 2**30, card.hardware.capability
        assert f"| `{name}` | {card.title} | {gib:.2f} | {major}.{minor} |" in text


def test_public_names_of_cka_are_all_described() -> None:
    """The page describes every name that ``from cka import ...`` offers."""
    text = (REFERENCE / "cka.md").read_text("utf-8")
    assert [name for name in cka.__all__ if f"`{name}" not in text] == []
