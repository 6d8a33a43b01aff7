"""Every hint is printed by the program of its row, and the program passes when it is followed."""

import ast
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import advice_page
import forked_processes
import pytest
from advice_table import CARD, COMMANDS, CPU, ELSEWHERE, ROWS, TENSORS

from emulated_cuda.torch_versions import allocator_variable
from pytest_cka_memory.core.figures import FIGURES
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.torch_versions import KEEPS_WORKSPACES

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MODULES = {
    "core.reserve": set(),
    "holders.chains": set(),
    "holders.cycles": {"_PLAIN"},
    "holders.groups": {"IN_POOLS"},
    "holders.growing": {"_GROWS", "_STATE"},
    "holders.hints": set(),
    "holders.owners": set(),
    "holders.references": {"SCRIPT_CONSTANT"},
    "holders.survivors": set(),
    "limits.figures": {"WORKER", "_FIGURE"},
    "meters.accelerator": set(),
}
"""The modules that have hints as constants -> constants that are none."""
_LONGEST_WORDING = 60
"""A longer text in a function is a hint that is no constant."""


class Outcome(NamedTuple):
    """What a program of the session has done."""

    skipped: str | None
    text: str
    """Of its failure; empty if it passed."""

    @property
    def printed(self) -> list[str]:
        """The hints, each as one line."""
        return [re.sub(r"(?<=\.py:)\d+", "N", hint) for hint in hints_in(self.text)]

    @property
    def line(self) -> str:
        """The text as one line."""
        return re.sub(r"(?<=\.py:)\d+", "N", " ".join(self.text.split()))


def hints_in(text: str) -> list[str]:
    """Return what follows ``what to do:``, with the more indented lines below it."""
    found: list[str] = []
    indent = -1
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip())
        start, is_first, hint = line.partition("what to do: ")
        if is_first and not start.strip():
            found.append(hint.strip())
            indent = depth
        elif indent >= 0 and depth > indent:
            found[-1] += f" {line.strip()}"
        else:
            indent = -1
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    """Return the outcomes of all programs on a device, by name; each device has one session."""
    known: dict[str, Mapping[str, Outcome]] = {}

    def of(device: str) -> Mapping[str, Outcome]:
        if device not in known:
            known[device] = run_session(device, tmp_path_factory.mktemp("session"))
        return known[device]

    return of


def run_session(device: str, folder: Path) -> Mapping[str, Outcome]:
    removed = ("PYTEST_XDIST", "PYTEST_ADDOPTS", "CUDA_", "PYTORCH_", "CI", "GITHUB_")
    environment = {name: v for name, v in os.environ.items() if not name.startswith(removed)}
    environment.update(OMP_NUM_THREADS="1", COLUMNS="100", PYTHONPATH=f"{ROOT}:{FOLDER}")
    environment.update(ADVICE_DEVICE=device)
    if device == TENSORS:
        environment.update(CKA_MEMORY_NATIVE="0")
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:asyncio", "-W", "ignore"]
    junit = folder / "programs.xml"
    run = forked_processes.run(
        [
            *("pytest", "-c", os.devnull, f"--rootdir={FOLDER}", *options),
            f"--cka-memory-device={CARD if device == CARD else CPU}",
            *(f"--junitxml={junit}", "session_programs.py"),
        ],
        environment=environment,
        folder=FOLDER,
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    return {
        str(case.get("name")).partition("[")[2].rstrip("]"): outcome_of(case)
        for case in ElementTree.parse(junit).iter("testcase")
    }


def outcome_of(case: ElementTree.Element) -> Outcome:
    skipped = case.find("skipped")
    failed = [found for kind in ("failure", "error") if (found := case.find(kind)) is not None]
    reason = None if skipped is None else str(skipped.get("message"))
    return Outcome(reason, "\n".join(found.text or "" for found in failed))


def cases(device: str) -> Iterator[object]:
    marks = [pytest.mark.emulates] if device == CARD else []
    for row in ROWS:
        if device in row.devices:
            yield pytest.param(
                device, row, marks=marks, id=f"{device.partition(':')[0]}-{row.name}"
            )


@pytest.mark.parametrize(("device", "row"), [*cases(CPU), *cases(TENSORS), *cases(CARD)])
def test_hint_is_printed_and_following_it_repairs_the_program(outcomes, device, row):
    """The program breaks its limit and prints the hint; edited as the hint says, it passes."""
    found = outcomes(device)
    if found[row.name].skipped is not None:
        pytest.skip(found[row.name].skipped)
    first = found[row.name]
    hint = row.hint.replace("PYTORCH_ALLOC_CONF", allocator_variable())
    printed = without_code(first.line) if row.in_message else [*map(without_code, first.printed)]
    assert without_code(hint) in printed, first.text
    assert not {
        name: text for each in row.followed if (text := found[(name := each.__name__)].text)
    }
    assert bool(row.followed) is not row.is_command


def without_code(hint: str) -> str:
    """Return a hint without expressions on Python 3.10, which knows only the whole line of each."""
    has_columns = sys.version_info >= (3, 11)
    return hint if has_columns else re.sub(r"`[^`]*` at (?=advice_)", "`...` at ", hint)


def constants() -> Iterator[object]:
    for name, others in MODULES.items():
        module = importlib.import_module(f"pytest_cka_memory.{name}")
        values = {key: value for key, value in vars(module).items() if key not in others}
        values.update(values.pop("_BY_CALL", {}))
        for key, value in values.items():
            if isinstance(value, str) and " " in value and not key.startswith("__"):
                yield pytest.param(value, id=f"{name}-{key}")
    for figure in FIGURES.values():
        for text in filter(None, (figure.advice, figure.advice_if_at_entry)):
            yield pytest.param(text, id=f"figure-{figure.name}")


@pytest.mark.parametrize("constant", [*constants()])
def test_each_constant_of_the_hint_modules_is_in_the_table(constant):
    """A hint that is added to the modules without a program that follows it fails here."""
    pattern = re.compile(".+".join(map(re.escape, re.split(r"\{\w*\}", constant))), re.DOTALL)
    hints = [*(row.hint for row in ROWS), *ELSEWHERE.values(), *COMMANDS]
    assert any(pattern.search(hint) for hint in hints), constant


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("limits.")])
def test_hints_are_constants(name):
    """The functions of these modules have no hint of their own, which no test would find."""
    module = importlib.import_module(f"pytest_cka_memory.{name}")
    tree = ast.parse(inspect.getsource(module))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    texts = {
        node.value
        for function in functions
        for statement in function.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not {text for text in texts if len(text) > _LONGEST_WORDING}


KEEPING = """
import torch

def attempt(item, x):
    try:
        raise ValueError("odd")
    except ValueError as error:
        item.kept = error
"""
KEPT = """
import pytest
import torch

@pytest.mark.zero_retention
def test_step(request, cka_memory):
    with cka_memory.measure():
        plugin = request.config.pluginmanager.get_plugin("keeping")
        if plugin is not None:
            plugin.attempt(request.node, torch.ones(250))
        del plugin
"""


def test_plugin_that_keeps_an_exception_is_left_out_as_advised(pytester, monkeypatch):
    """The hint names the attribute in which a plugin keeps an exception; without it all is well."""
    pytester.makepyfile(keeping=KEEPING, test_it=KEPT)
    monkeypatch.syspath_prepend(pytester.path)
    options = "--cka-memory-device=cpu", "-p", "keeping", "-p", "no:cacheprovider"
    found = pytester.runpytest(*options)
    name = "test_plugin_that_keeps_an_exception_is_left_out_as_advised"
    assert ELSEWHERE[name] in hints_in(found.stdout.str()), found.stdout.str()
    pytester.runpytest(*options, "-p", "no:keeping").assert_outcomes(passed=1)


def test_detach_is_not_advised_if_the_tensor_itself_is_what_is_kept(outcomes):
    """`detach()` keeps the same bytes, so it is advised only for what the graph alone keeps."""
    for name in ("outputs", "kept", "view"):
        assert not any("detach()" in hint for hint in outcomes(CPU)[name].printed)


def test_no_grad_is_not_advised_for_the_peak_of_a_training_step(outcomes):
    """A backward pass needs the graph that keeps most of the peak."""
    assert not any("no_grad" in hint for hint in outcomes(CPU)["training_step"].printed)


@pytest.mark.sources
@pytest.mark.skipif(
    not (torch_private.SHOWS_SAVED and KEEPS_WORKSPACES), reason="this torch has other hints"
)
def test_page_of_hints_has_the_table():
    """The page is written by advice_page.py; run it after the table has changed."""
    assert advice_page.PAGE.read_text("utf-8") == advice_page.page()
