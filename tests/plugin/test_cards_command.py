"""``python -m pytest_cka_memory cards``: sessions on several emulated cards, and their table."""

import json
import subprocess
from types import SimpleNamespace

import forked_processes
import pytest

from pytest_cka_memory.cli import main as command_of_cards
from pytest_cka_memory.cli.main import OK, REGRESSION, UNUSABLE, main

GB = 2**30
TESTS = """
import pytest
import torch


@pytest.mark.parametrize("gb", [1, 20, 24])
def test_allocation(gb):
    held = torch.empty(gb * 2**30, dtype=torch.uint8, device="cuda")


def test_batch(cka_memory):
    assert cka_memory.largest(lambda n: torch.empty(n, 2**30, dtype=torch.uint8, device="cuda")) > 1


def test_wrong():
    assert torch.cuda.get_device_name() == "Tesla T4"
"""


@pytest.fixture
def forked(monkeypatch):
    """Fork the sessions of the command, which starts an interpreter for each otherwise."""

    def run(command, *, env, **_):
        return forked_processes.run(["python", *command[1:]], environment=env, merged=True)

    names = SimpleNamespace(run=run, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(command_of_cards, "subprocess", names)


@pytest.fixture
def cards(pytester, monkeypatch, capfd):
    """Run the command in a folder with `TESTS`; return its status, table and progress."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly -p no:cacheprovider")
    pytester.makepyfile(test_it=TESTS)

    def run(*arguments):
        status = main(["cards", *arguments])
        return status, *capfd.readouterr()

    return run


@pytest.mark.emulates
def test_table_of_two_cards(cards, forked):
    """Each test runs on each card: 20 GB exceed a T4 by 6,082.56 MB, 24 GB both cards."""
    arguments = ("test_it.py", "--cards", "t4,a10", "--no-values", "--format", "json")
    status, out, progress = cards(*arguments)
    rows = {(row["test"].partition("::")[2], row["card"]): row for row in json.loads(out)}
    assert status == REGRESSION
    assert {key: row["result"] for key, row in rows.items()} == {
        ("test_allocation[1]", "t4"): "fits",
        ("test_allocation[20]", "t4"): "out of memory",
        ("test_allocation[24]", "t4"): "out of memory",
        ("test_batch", "t4"): "fits",
        ("test_wrong", "t4"): "fits",
        ("test_allocation[1]", "a10"): "fits",
        ("test_allocation[20]", "a10"): "fits",
        ("test_allocation[24]", "a10"): "out of memory",
        ("test_batch", "a10"): "fits",
        ("test_wrong", "a10"): "failed",
    }
    usable = {"t4": int(14.56 * GB) - GB // 2, "a10": int(21.99 * GB) - GB // 2}
    assert all(row["usable_bytes"] == usable[card] for (_, card), row in rows.items())
    fitting = rows["test_allocation[20]", "a10"]
    assert fitting["peak_bytes"] == fitting["reserved_bytes"] == 20 * GB
    assert fitting["headroom_bytes"] == usable["a10"] - 20 * GB
    assert rows["test_allocation[20]", "t4"]["missing_bytes"] == 20 * GB - usable["t4"]
    # It fits on neither card, so torch's message is all that is known: 9.94 of 24 GB are missing.
    assert rows["test_allocation[24]", "t4"]["missing_bytes"] == round((24 - 14.06) * GB)
    assert [rows["test_batch", card]["largest"] for card in ("t4", "a10")] == [[14], [21]]
    assert "AssertionError" in rows["test_wrong", "a10"]["message"]
    assert progress.splitlines() == [
        *("t4 (1 of 2): running", "5 tests, t4: 3 of 5 fit"),
        *("a10 (2 of 2): running", "5 tests, a10: 3 of 5 fit"),
    ]


@pytest.mark.slow
@pytest.mark.emulates
def test_arguments_are_passed_to_pytest(cards):
    """All other arguments are those of pytest; if everything fits, the status is 0."""
    status, out, _ = cards("-k", "allocation and 1", "--cards=t4", "test_it.py")
    assert status == OK
    assert out.startswith("### Memory on emulated cards: t4: all 1 fit\n")
    assert "| `test_it.py::test_allocation[1]` | t4 | fits | 1024.00 | 1024.00 | 13373.4 |" in out


@pytest.mark.emulates
def test_page_of_a_card(cards, forked):
    """The page is the only text on the standard output, so that it can be written to a file."""
    arguments = ("-k", "allocation and 1", "--cards=t4", "test_it.py", "--format=html")
    status, out, _ = cards(*arguments)
    assert status == OK
    assert out.startswith("<!DOCTYPE html>")
    assert out.endswith("</html>\n")
    assert "<td data-label='Headroom'>13373.4</td>" in out


@pytest.mark.emulates
def test_wrong_argument_of_pytest_ends_the_command_with_its_message(cards, forked):
    """A session that cannot run ends the command, which prints what pytest printed."""
    status, out, errors = cards("--nonsense", "--cards=t4")
    assert (status, out) == (UNUSABLE, "")
    assert "unrecognized arguments: --nonsense" in errors
    assert "pytest ended on t4 with exit status 4; its output is above" in errors


def test_unknown_card_is_refused(cards):
    """An unknown card is named with the known ones before any session starts."""
    status, out, errors = cards("--cards", "t4,k80")
    assert (status, out) == (UNUSABLE, "")
    assert "--cards: unknown card 'k80'; write names from a100, a100-40gb, " in errors
    assert "running" not in errors


def test_other_commands_take_no_further_arguments(capsys):
    """Only this command passes arguments on; elsewhere an unknown one is a usage error."""
    with pytest.raises(SystemExit) as ended:
        main(["schema", "--nonsense"])
    assert ended.value.code == UNUSABLE
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err
