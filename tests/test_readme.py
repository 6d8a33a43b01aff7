"""The README is run: its Python, its commands, and the texts it says they print."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
TESTS = [text for text in PYTHON if "def test_" in text]
SCRIPTS = [text for text in PYTHON if "def test_" not in text]
COMMANDS = re.findall(r"^    (\S.*)$", re.sub(r"^```.*?^```", "", README, flags=re.M | re.S), re.M)
ON_REPORTS = [line for line in COMMANDS if line.startswith("python -m pytest_cka_memory ")]
ON_BASELINES = [line for line in COMMANDS if "-baseline" in line]
(PREDICTING,) = (line for line in COMMANDS if "predict:" in line)
BENCHMARKS = [line for line in COMMANDS if line.startswith("python tests/benchmarks/")]
RUN_BY_CI = [line for line in COMMANDS if line.startswith("pip install -e ")]
NEEDS_A_COMPILER = [line for line in COMMANDS if "tests/backend" in line]

FIXTURES = """
import pytest, torch

@pytest.fixture
def model(cka_memory):
    layers = torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    return torch.nn.Sequential(*layers).to(cka_memory.device)

@pytest.fixture
def loader():
    return torch.utils.data.DataLoader(torch.randn(48, 8), batch_size=8)
"""


def test_the_readme_shows_its_two_commands():
    """Each does all of its own set-up, and nothing else is called the quick start."""
    commands = [line.strip() for line in README.splitlines() if line.strip().startswith("pip ")]
    assert commands[:2] == [
        'pip install -e ".[test]" && pytest tests/gates --cka-memory-report',
        'pip install -e ".[test]" && pytest -n auto --dist worksteal',
    ]


@pytest.mark.parametrize("block", TESTS, ids=lambda text: re.findall(r"def (test_\w+)", text)[0])
def test_the_readme_tests_do_what_it_says(pytester, block):
    """They pass, but for the one shown failing, whose text is the text shown."""
    pytester.makeconftest(FIXTURES)
    pytester.makepyfile(test_training=block)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--cka-memory-device=cpu")
    if "test_training_loop" not in block:
        result.assert_outcomes(passed=1)
        return
    result.assert_outcomes(failed=1)
    (shown,) = [text for language, text in BLOCKS if text.startswith("flat_per_batch broken:")]
    # Here the file lies in a folder of pytest's own making, named before it.
    printed = re.sub(r"[\w.-]+/(test_training\.py)", r"\1", result.stdout.str())
    for line in shown.splitlines():
        assert line in printed


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda text: text.split("\n")[0])
def test_the_readme_scripts_run(pytester, block):
    """Their assertions hold."""
    script = pytester.makepyfile(block)
    assert pytester.runpython(script).ret == 0


def test_every_command_and_block_is_in_some_test():
    """A new one has to find its place here."""
    known = [*ON_REPORTS, *ON_BASELINES, PREDICTING, *BENCHMARKS, *RUN_BY_CI, *NEEDS_A_COMPILER]
    assert sorted(known) == sorted(COMMANDS)
    assert {language for language, _ in BLOCKS} == {"python", "text", "yaml"}
    assert len([text for language, text in BLOCKS if language == "text"]) == len(SHOWN_BY)


SHOWN_BY = {
    "flat_per_batch broken:": "test_the_readme_tests_do_what_it_says",
    "region                     batches": "tests/test_benchmarks.py, as one of the tables drawn",
    "region              figure": "tests/memory/test_cli.py",
    "--cka-memory-baseline broken:": "test_the_commands_on_baselines_judge_as_shown",
}


@pytest.mark.parametrize("start", SHOWN_BY)
def test_each_text_is_there_once(start):
    """The ones named above; where they are compared with what is printed, it says."""
    assert [text.startswith(start) for _, text in BLOCKS].count(True) == 1


MEASURED = """
from pytest_cka_memory.testing import ScriptedMeter

METER = ScriptedMeter()

def pytest_cka_memory_meter(device):
    return METER
"""


def run(pytester, line):
    """Run a line of the README with this Python, in the folder of the test."""
    words = shlex.split(line, comments=True)
    program = {"python": [sys.executable], "pytest": [sys.executable, "-m", "pytest"]}[words[0]]
    return pytester.run(*program, *words[1:])


@pytest.fixture
def retaining(pytester):
    """Write a test that retains so many bytes."""
    pytester.makeconftest(MEASURED)

    def write(size):
        text = f"from conftest import METER\n\ndef test_it(cka_memory): METER.allocate({size})\n"
        (pytester.path / "test_it.py").write_text(text, encoding="utf-8")

    return write


def test_the_commands_on_baselines_judge_as_shown(pytester, retaining):
    """The first writes what was; the second fails what is six per cent above, in these words."""
    update, hold = ON_BASELINES
    retaining(100_000)
    assert run(pytester, update).ret == 0
    assert run(pytester, hold).ret == 0
    retaining(106_000)
    judged = run(pytester, hold)
    judged.assert_outcomes(failed=1)
    (shown,) = [text for _, text in BLOCKS if text.startswith("--cka-memory-baseline broken:")]
    assert " ".join(shown.split()) in " ".join(judged.stdout.str().split())


def test_the_commands_on_reports_run(pytester, retaining):
    """On the reports of a session: each prints or writes what it says."""
    retaining(100_000)
    assert run(pytester, "pytest --cka-memory-json=memory.json").ret == 0
    shutil.copy(pytester.path / "memory.json", pytester.path / "main.json")
    shown, page, compared = (run(pytester, line) for line in ON_REPORTS)
    assert [shown.ret, page.ret, compared.ret] == [0, 0, 0]
    shown.stdout.fnmatch_lines("*test_it.py::test_it*")
    compared.stdout.fnmatch_lines("compared: none of 1 region rose*")
    assert "test_it" in (pytester.path / "memory.html").read_text(encoding="utf-8")


@pytest.mark.predicts
def test_the_same_tests_are_predicted(pytester):
    """The fixture's example, on fake tensors."""
    (example,) = [text for text in TESTS if "test_fixture_by_example" in text]
    pytester.makepyfile(test_training=example)
    predicted = run(pytester, f"{PREDICTING} -p no:cacheprovider --cka-memory-report")
    predicted.assert_outcomes(passed=1)
    predicted.stdout.fnmatch_lines("*predicted*")


@pytest.mark.parametrize("line", BENCHMARKS)
def test_the_benchmarks_take_the_options_shown(pytester, monkeypatch, line):
    """Running them takes minutes; that their options are known does not."""
    monkeypatch.chdir(ROOT)
    _, script, *words = shlex.split(line)
    usage = run(pytester, f"python {ROOT / script} --help").stdout.str()
    options = [word for word in words if word.startswith("--")]
    assert options
    assert all(f"{option} " in usage for option in options)


def test_the_gate_shown_calls_the_action_as_it_is():
    """Its inputs and outputs are there, under these names."""
    yaml = pytest.importorskip("yaml")
    (shown,) = [yaml.safe_load(text) for language, text in BLOCKS if language == "yaml"]
    gate, upload = shown["steps"]
    folder = gate["uses"].removeprefix("OWNER/pytest-cka-memory/").removesuffix("@COMMIT")
    action = yaml.safe_load((ROOT / folder / "action.yml").read_text(encoding="utf-8"))
    assert set(gate["with"]) <= set(action["inputs"])
    used = set(re.findall(r"steps\.gate\.outputs\.([\w-]+)", upload["with"]["path"]))
    assert used == {"json", "html"}
    assert used <= set(action["outputs"])
