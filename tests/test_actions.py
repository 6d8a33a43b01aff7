"""Steps of the composite action, and rules that keep the workflows secure."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forked_processes
import pytest

yaml = pytest.importorskip("yaml")

GITHUB = Path(__file__).parents[1] / ".github"
ACTION_FILE = GITHUB / "actions" / "memory-gate" / "action.yml"
ACTION = yaml.safe_load(ACTION_FILE.read_text("utf-8"))
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
FILES = [ACTION_FILE, *WORKFLOWS]

TESTS = """
import pytest
from pytest_cka_memory.testing import ScriptedMeter

METER = ScriptedMeter()

@pytest.mark.max_retained_mb(1)
def test_it(): METER.allocate({size})
"""
CONFTEST = """
from test_it import METER

def pytest_cka_memory_meter(device):
    return METER if device == "auto" else None
"""


def steps_of(data):
    """Return every step of a workflow or a composite action."""
    if "runs" in data:
        return data["runs"]["steps"]
    return [step for job in data["jobs"].values() for step in job["steps"]]


def _filled(text, inputs, outputs):
    """Replace the expressions that the action uses, as GitHub's runner does."""

    def value(match):
        *_, context, name = ["", *match[1].replace("steps.reports.", "").split(".")]
        return {"inputs": inputs, "outputs": outputs}[context][name]

    return re.sub(r"\$\{\{ ([\w.-]+) \}\}", value, str(text))


@pytest.fixture(scope="module")
def python():
    """Return a program that runs Python with torch imported, for sessions that would import it."""
    return forked_processes.interpreter()


@pytest.fixture
def gate(tmp_path):
    """Run the action's shell steps on a project, as GitHub's runner does."""
    project = tmp_path / "project"
    project.mkdir()
    # test_it.py may be written twice within a second, so nothing compiled is kept here.
    (project / "__pycache__").touch()
    (project / "conftest.py").write_text(CONFTEST, "utf-8")
    (project / "test_other.py").write_text("def test_other(cka_memory): pass\n", "utf-8")
    defaults = {name: spec.get("default") for name, spec in ACTION["inputs"].items()}
    files = {name: tmp_path / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}

    def run(size, **given):
        (project / "test_it.py").write_text(TESTS.format(size=size), "utf-8")
        inputs = {**defaults, "python": sys.executable}
        inputs |= {name.replace("_", "-"): value for name, value in given.items()}
        for file in files.values():
            file.write_text("", "utf-8")
        outputs, statuses, output = {}, {}, ""
        for step in steps_of(ACTION):
            if "compare-with" in step.get("if", "") and not inputs["compare-with"]:
                continue
            if 1 in statuses.values() and "cancelled" not in step.get("if", ""):
                continue
            env = {k: _filled(v, inputs, outputs) for k, v in step.get("env", {}).items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=project,
                env={
                    **os.environ,
                    **env,
                    **{name: str(file) for name, file in files.items()},
                    # Other plugins take more time to import than the rest of these sessions.
                    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                    "PYTEST_ADDOPTS": "-p cka_memory -p no:cacheprovider",
                    "GITHUB_ACTIONS": "true",
                    "GITHUB_ACTION_PATH": str(ACTION_FILE.parent),
                    "GITHUB_WORKSPACE": str(project),
                    "RUNNER_TEMP": str(tmp_path),
                },
                capture_output=True,
                text=True,
                check=False,
            )
            output += done.stdout + done.stderr
            statuses[step["name"]] = done.returncode
            lines = files["GITHUB_OUTPUT"].read_text("utf-8").splitlines()
            outputs = dict(line.split("=", 1) for line in lines)
        return statuses, outputs, output, files["GITHUB_STEP_SUMMARY"].read_text("utf-8")

    return run


def test_kept_limit_passes_and_writes_reports(gate):
    """If all limits hold, each output of the action names a file,
    and the summary has the report.
    """
    statuses, outputs, output, summary = gate(2**20)
    assert set(statuses.values()) == {0}, output
    assert set(outputs) == set(ACTION["outputs"])
    assert len(json.loads(Path(outputs["json"]).read_text("utf-8"))["regions"]) == 2
    assert "<html" in Path(outputs["html"]).read_text("utf-8")
    assert Path(outputs["markdown"]).read_text("utf-8").startswith("### ")
    assert "### Memory: " in summary


def test_breach_fails_the_gate_and_is_annotated(gate, python):
    """If a limit breaks, the gate fails after its reports are written, so they can be uploaded."""
    statuses, outputs, output, summary = gate(2**20 + 1, python=python)
    assert statuses["Measure"] == 1
    assert "::error file=test_it.py,line=7,title=max_retained_mb(1) broken::" in output
    assert "broke a limit" in summary
    assert all(Path(path).is_file() for path in outputs.values())


@pytest.mark.parametrize(
    ("given", "status", "message"),
    [
        ({"min_regions": "3"}, 1, "2 regions measured, but --cka-memory-min-regions=3"),
        ({"paths": "test_it.py\n\n"}, 0, "1 passed"),
        ({"paths": "test_it.py\ntest_other.py\n"}, 0, "2 passed"),
        ({"arguments": "-k\nnot it\n"}, 0, "1 passed, 1 deselected"),
        ({"arguments": "-k\nnothing"}, 1, "0 regions measured"),
        ({"every_test": "true"}, 0, "verdict"),
        ({"tolerance": "much"}, 4, "--cka-memory-tolerance"),
        ({"baseline": "none.json"}, 4, "none.json does not exist; write one with"),
        ({"paths": "$(touch hacked)"}, 4, "$(touch hacked)"),
    ],
    ids=str,
)
def test_inputs_are_passed_to_pytest_unchanged(gate, tmp_path, python, given, status, message):
    """Inputs are split at line ends only, and are never run as code."""
    statuses, _, output, _ = gate(8, python=python, **given)
    assert statuses["Measure"] == status, output
    assert message in output
    assert not (tmp_path / "project" / "hacked").exists()


def test_unknown_device_fails_the_gate(gate, python):
    """The device is passed to pytest, which refuses one that torch does not know."""
    statuses, _, output, _ = gate(8, device="nothing", python=python)
    assert statuses["Measure"] == 4
    assert "unknown device 'nothing'" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "tolerance", "status"),
    [(2**19, "", 0), (2**19 + 2**15, "", 1), (2**19 + 2**15, "10%", 0)],
    ids=["same", "six-per-cent", "tolerated"],
)
def test_increase_above_the_base_branch_fails_the_gate(
    gate, tmp_path, python, size, tolerance, status
):
    """If memory grew over the base branch, the gate fails and the summary has the differences."""
    _, outputs, _, _ = gate(2**19, python=python)
    old = tmp_path / "old.json"
    Path(outputs["json"]).rename(old)
    statuses, _, output, summary = gate(
        size, compare_with=str(old), tolerance=tolerance, python=python
    )
    assert statuses["Measure"] == 0, output
    assert statuses["Compare with the base branch"] == status, output
    assert ("test_it" in summary.rpartition("### ")[2]) or status == 0


def test_missing_base_report_fails_the_gate(gate, python):
    """Without a report of the base branch, the exit status is 2 and the missing file is named."""
    statuses, _, output, _ = gate(8, compare_with="none.json", python=python)
    assert statuses["Compare with the base branch"] == 2
    assert "none.json" in output


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(GITHUB)))
def test_scripts_contain_no_expressions(file):
    """An expression in a script could run a pull request's text; scripts use the environment."""
    scripts = [
        step["run"] for step in steps_of(yaml.safe_load(file.read_text("utf-8"))) if "run" in step
    ]
    assert scripts
    assert [script for script in scripts if "${{" in script] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(GITHUB)))
def test_third_party_actions_are_pinned_by_hash(file):
    """A tag can be moved, so actions of others are pinned by hash, with the version as comment."""
    used = re.findall(r"uses: (?!\./)(.*)", file.read_text("utf-8"))
    assert [use for use in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", use)] == []


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_have_read_permission_only(file):
    """No job has more permissions than the checkout requires; none keeps its credentials.

    Publishing needs a token of the workflow's identity, and nothing else.
    """
    data = yaml.safe_load(file.read_text("utf-8"))
    assert data["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in data["jobs"].items() if "permissions" in job}
    is_release = file.name == "release.yml"
    assert more == ({"publish": {"id-token": "write"}} if is_release else {})
    checkouts = [s for s in steps_of(data) if s.get("uses", "").startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_gpu_workflow_names_its_device_and_a_minimum():
    """The GPU workflow fails on a runner without a GPU, and if all tests were skipped."""
    steps = steps_of(yaml.safe_load((GITHUB / "workflows" / "gpu.yml").read_text("utf-8")))
    (gate,) = [step for step in steps if step.get("uses") == "./.github/actions/memory-gate"]
    assert gate["with"]["device"] == "cuda"
    assert int(gate["with"]["min-regions"]) > 0
    assert set(gate["with"]) <= set(ACTION["inputs"])
