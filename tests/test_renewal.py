"""Which results are older than their code, and that each result belongs to a table."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROOT = Path(__file__).parents[1]


@pytest.fixture
def renewal(monkeypatch):
    """Return the names of ``renew.py``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / "renew.py"))


def test_every_result_belongs_to_a_table_and_has_its_conditions(renewal):
    """A committed result that no table names would never be renewed."""
    folder = BENCHMARKS / "results"
    files = {file.name for file in folder.glob("*.json")} - {"conditions.json"}
    named = {
        file.name
        for table in renewal["TABLES"].values()
        for file in folder.glob(table.file.format(torch="*"))
    }
    assert named == files
    known = json.loads((folder / "conditions.json").read_text("utf-8"))
    assert set(known) == files
    assert [name for name, given in known.items() if not {"date", "processor"} <= set(given)] == []


@pytest.mark.sources
def test_code_and_scripts_of_tables_exist(renewal):
    """Each table names a script and folders that are there."""
    for table in renewal["TABLES"].values():
        if table.script != renewal["PYTEST"]:
            script = (BENCHMARKS / table.script).read_text("utf-8")
            assert re.search(r"\b(args|arguments|options)\.json\b", script), (
                "it writes where it is told to"
            )
        assert [folder for folder in table.code if not (ROOT / folder).exists()] == []


def commits_to(folder):
    """Make a repository; return a function that adds a line to a file and commits it."""
    subprocess.run(["git", "init", "-q", str(folder)], check=True)

    def commit(name, line="line"):
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("a") as file:
            file.write(f"{line}\n")
        own = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["add", name], [*own, "commit", "-qm", f"Change {name}"]):
            subprocess.run(["git", "-C", str(folder), *words], check=True)

    return commit


def test_result_is_older_than_its_code_if_a_later_commit_changed_the_code(renewal, tmp_path):
    """Only commits after the one that wrote the result or a newer one at which it was measured
    count, and only those that change its code.
    """
    commit = commits_to(tmp_path)
    since = renewal["commits_since"]
    result = tmp_path / "result.json"
    commit("code/a.py")
    assert since(result, ["code"], tmp_path) is None
    commit("result.json")
    commit("other/b.py")
    assert since(result, ["code"], tmp_path) == []
    commit("code/a.py")
    assert [line.partition(" ")[2] for line in since(result, ["code"], tmp_path)] == [
        "Change code/a.py"
    ]
    head = ["git", "-C", str(tmp_path), "rev-parse", "HEAD"]
    measured = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    assert since(result, ["code"], tmp_path, measured) == []
    assert len(since(result, ["code"], tmp_path, f"{measured}~3")) == 1
    assert len(since(result, ["code"], tmp_path, "0" * 40)) == 1


def test_comments_and_docstrings_do_not_make_a_result_older(renewal, tmp_path):
    """They move no figure; a line that runs, another language and a new file may."""
    commit = commits_to(tmp_path)
    commit("code/a.py", '"""Say one thing."""\nLIMIT = 1\ndef f():\n    """Do."""\n    return 1')
    commit("code/b.c", "int b;")
    commit("result.json")
    commit("code/a.py", "# why")
    text = (tmp_path / "code/a.py").read_text()
    (tmp_path / "code/a.py").write_text(text.replace("one thing", "another").replace("Do", "Say"))
    commit("code/a.py", "")
    result = tmp_path / "result.json"
    assert renewal["commits_since"](result, ["code"], tmp_path) == []
    commit("code/a.py", "LIMIT = 2")
    assert len(renewal["commits_since"](result, ["code"], tmp_path)) == 3
    assert len(renewal["commits_since"](result, ["code/b.c"], tmp_path)) == 0
    commit("result.json")
    commit("code/b.c", "// why")
    assert len(renewal["commits_since"](result, ["code"], tmp_path)) == 1
    commit("result.json")
    commit("code/c.py", "# why")
    assert len(renewal["commits_since"](result, ["code"], tmp_path)) == 1


def test_unknown_table_is_refused_with_the_known_ones(renewal):
    """The command names the tables that exist."""
    command = [sys.executable, str(BENCHMARKS / "renew.py"), "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown tables: nothing. Known: leaks, " in done.stderr


def test_unit_tests_of_nox_exist():
    """Each module that ``nox -s unit`` runs is there."""
    text = (ROOT / "noxfile.py").read_text("utf-8")
    names = text.partition('UNIT = """')[2].partition('"""')[0].split()
    assert len(names) > 20
    missing = [name for name in names if not (ROOT / f"tests/memory/test_{name}.py").exists()]
    assert missing == []


@pytest.fixture
def differences(monkeypatch):
    """Return the comparison of a part with a stored result."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return runpy.run_path(str(BENCHMARKS / "stored_rows.py"))["differences"]


def test_part_of_a_result_is_found_in_it_wherever_its_rows_stand(differences):
    """Times, and addresses in messages, differ with each run and say nothing."""
    stored = {
        "date": "2026-01-01",
        "operators": 3,
        "rows": [
            {"case": "a", "bytes": 1, "seconds": 0.1},
            {"case": "b", "bytes": 2, "seconds": 0.1, "printed": ["reads at 0x82cf57400000"]},
            {"case": "c", "held_by": "leaks.__compiled_fn_1_31ea5f43_7b99_4836_9438_10470074a5a3"},
        ],
    }
    part = {
        "date": "2026-02-02",
        "operators": 1,
        "rows": [
            {"case": "b", "bytes": 2, "seconds": 9.9, "printed": ["reads at 0x7b7afb800200"]},
            {"case": "c", "held_by": "leaks.__compiled_fn_1_abe3195f_b9e4_401b_9834_1de56435e6cf"},
        ],
    }
    assert differences(part, stored, ignored=("operators",)) == []
    assert differences(part, stored) == ["operators: 3 stored, now 1"]


def test_row_that_differs_is_named_with_both_values(differences):
    """The line says which row, which figure, and what was stored."""
    stored = [{"case": "a", "bytes": 1, "ok": True}, {"case": "b", "bytes": 2, "ok": True}]
    assert differences([{"case": "b", "bytes": 3, "ok": True}], stored) == [
        "b, bytes: 2 stored, now 3"
    ]
    assert differences([{"case": "b", "bytes": 2, "ok": 1}], stored) == [
        "b, ok: True stored, now 1"
    ]
    assert differences([{"case": "c", "bytes": 2, "ok": True}], stored) == [
        "c, case: 'b' stored, now 'c'"
    ]
    assert differences({"a": {"x": [1, 2]}}, {"a": {"x": [1, 3]}}) == ["a, x 1: 3 stored, now 2"]
    assert differences({"new": 1, "failed": {}}, {}) == ["new: not stored, now 1"]
    assert differences({"mean": 0.72272784}, {"mean": 0.7227278426}) == []
    assert differences({"error": 3e-16}, {"error": 1e-16}) == []
    assert differences({"printed": "process 7 ended"}, {"printed": "process 81 ended"}) == []
    assert differences({"printed": "loss 0.68582332"}, {"printed": "loss 0.68582314"}) == []
    assert differences({"printed": "loss 0.68582332"}, {"printed": "loss 0.68592314"}) != []
    assert differences({"printed": "loss 0.68"}, {"printed": "loss 0.69"}) != []
    assert differences({"mean": 0.7228}, {"mean": 0.7227}) == ["mean: 0.7227 stored, now 0.7228"]


def test_times_of_a_part_may_differ_by_the_factor_of_the_table(differences):
    """Without a factor they are not compared; a time that is missing on one side differs."""
    stored = [{"case": "a", "bytes": 1, "seconds": 2.0}, {"case": "b", "bytes": 1, "seconds": None}]
    within = {"seconds": 1.5}
    assert differences([{"case": "a", "bytes": 1, "seconds": 9.0}], stored) == []
    for seconds in (1.34, 2.0, 3.0):
        part = [{"case": "a", "bytes": 1, "seconds": seconds}]
        assert differences(part, stored, within=within) == []
    for seconds in (1.3, 3.1):
        part = [{"case": "a", "bytes": 1, "seconds": seconds}]
        assert differences(part, stored, within=within) == [
            f"a, seconds: 2.0 stored, now {seconds}, more than a factor of 1.5"
        ]
    assert differences([{"case": "b", "bytes": 1, "seconds": None}], stored, within=within) == []
    assert differences([{"case": "b", "bytes": 1, "seconds": 2.0}], stored[1:], within=within) == [
        "b, seconds: None stored, now 2.0, more than a factor of 1.5"
    ]


def test_table_without_a_part_cannot_be_confirmed(renewal):
    """It takes no longer to measure it again."""
    command = [sys.executable, str(BENCHMARKS / "renew.py"), "--confirm", "tests and tensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "tests and tensors: no part can be compared; measure it" in done.stderr


def test_part_that_needs_a_folder_says_what_to_write():
    """It is not among those that are confirmed without a name."""
    command = [sys.executable, str(BENCHMARKS / "renew.py"), "--confirm", "emulated suites"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--confirm 'emulated suites' -- FOLDER pytorch-metric-learning" in done.stderr


def test_what_follows_two_dashes_is_no_table():
    """It is for the table's script."""
    names = ["--confirm", "nothing", "--", "folder"]
    command = [sys.executable, str(BENCHMARKS / "renew.py"), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown tables: nothing. Known: " in done.stderr


def test_command_of_a_table_writes_to_the_file(renewal):
    """The gates are a session of pytest, everything else is a script."""
    tables, file = renewal["TABLES"], Path("result.json")
    assert tables["gates"].command(["-x"], file)[1:] == [
        *("-m", "pytest", f"--rootdir={ROOT}", "--cka-memory-json=result.json"),
        *(str(ROOT / "tests" / "gates"), "-q", "-x"),
    ]
    soak = tables["soak"].command(["--living"], file)
    assert soak[1:] == [str(BENCHMARKS / "soak.py"), "--json", "result.json", "--living"]
