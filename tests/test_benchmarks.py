"""What the benchmarks show is what they measured: tables, figure and page, drawn from the JSON."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROWS = [
    {"part": "sizes", "batch_size": 64, "samples": 128, "peak_bytes": 3 * 2**20},
    {"part": "sizes", "batch_size": 128, "samples": 128, "peak_bytes": 5 * 2**20},
    {"part": "counts", "batch_size": 64, "batches": 1, "peak_bytes": 2**20, "retained_bytes": 0},
    {"part": "counts", "batch_size": 64, "batches": 4, "peak_bytes": 2**20},
]
ROWS = [
    {"library": "<ours>", "retained_bytes": 3 * 2**20, "batches": 2, "device": "a & b"}
    | {"threads": 1, "torch": "2", "meter": "m"}
    | row
    for row in ROWS
] + [{"part": "counts", "library": "other", "skipped": "failed: no such call"}]


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scripts import each other, as they do when they are run."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


@pytest.mark.usefixtures("benchmarks")
def test_tables_in_docs_are_those_of_the_committed_results() -> None:
    """Drawing the tables of the docs again from the committed results changes nothing."""
    import draw_tables

    texts = {page: page.read_text("utf-8") for page in draw_tables.TABLES}
    assert {page: draw_tables.drawn(page, text) for page, text in texts.items()} == texts
    assert any(draw_tables.libraries() in text for text in texts.values())


@pytest.mark.usefixtures("benchmarks")
def test_page_without_a_place_for_its_table_is_an_error() -> None:
    """A page that lost the place for its table raises; otherwise the table would go out of date."""
    import draw_tables

    page = draw_tables.DOCS / "explanation" / "figures.md"
    with pytest.raises(ValueError, match="no place for the table 'gates'"):
        draw_tables.drawn(page, "# no tables here")


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize(
    ("version", "library", "kind", "percent"),
    [
        ("2.9.1", "pytorch-cka 0.1.3", "peak", 0.09),
        ("2.9.1", "torch-cka 0.21", "peak", 0.29),
        ("2.9.1", "torch-cka 0.21", "retained", 0.31),
        ("2.15.0", "pytorch-cka 0.1.3", "peak", 0.72),
        ("2.15.0", "torch-cka 0.21", "peak", 3.78),
        ("2.15.0", "torch-cka 0.21", "retained", 1.40),
    ],
)
def test_emulated_figures_are_as_close_to_those_of_a_real_card_as_the_pages_say(
    version: str, library: str, kind: str, percent: float
) -> None:
    """The largest error of the committed emulated figures is the percentage that the pages give."""
    from side_by_side_published import PUBLISHED

    (file,) = (BENCHMARKS / "results").glob(f"notebook-*-torch-{version}.json")
    rows = [row for row in json.loads(file.read_text("utf-8")) if row["library"] == library]
    published = {size: getattr(both, kind) for size, both in PUBLISHED[library].items()}
    found = {row["batch_size"]: row[f"{kind}_bytes"] / 2**20 for row in rows}
    errors = {size: 100 * (found[size] / published[size] - 1) for size in published}
    assert round(max(map(abs, errors.values())), 2) == percent


@pytest.mark.usefixtures("benchmarks")
def test_every_view_shows_what_was_measured() -> None:
    """Text, page and figure have the same values; growth is that
    from the first to the last count.
    """
    import side_by_side_views as views

    text = views.text(ROWS)
    assert (
        "<ours>: peaks 3.00, 5.00 MB; retains 3.00 MB on average; retention grows by 1.00" in text
    )
    assert "other: no figure, failed: no such call" in text
    assert "time" not in text
    page = views.page(ROWS)
    assert "&lt;ours&gt;: peaks 3.00" in page
    assert "<ours>:" not in page
    assert page.count("<svg") == 1
    timeline, peak, retained = views.figure(ROWS).axes
    assert timeline.lines[0].get_ydata().tolist() == [0, 3]
    assert [bar.get_height() for bar in peak.patches] == [3, 5]
    assert [bar.get_height() for bar in retained.patches] == [3, 3]


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize(
    "file", sorted((BENCHMARKS / "results").glob("side-by-side-*.json")), ids=lambda path: path.stem
)
def test_the_committed_text_is_drawn_from_the_committed_figures(file: Path) -> None:
    """The committed text is what the script prints for the committed figures."""
    import side_by_side_views as views

    rows = json.loads(file.read_text("utf-8"))
    assert file.with_suffix(".txt").read_text("utf-8") == views.text(rows) + "\n"


JUNIT = """<testsuites><testsuite name="pytest">
<testcase classname="a" name="test_one"/>
<testcase classname="a" name="test_two"><failure message="no"/><error message="nor"/></testcase>
<testcase classname="a" name="test_three"><skipped type="pytest.skip" message="no GPU"/></testcase>
<testcase classname="b" name="test_four"><skipped type="pytest.skip" message="no GPU"/></testcase>
<testcase classname="b" name="test_five"><skipped type="pytest.xfail" message="known"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.usefixtures("benchmarks")
def test_outcomes_have_names_of_failures_and_counts_of_reasons() -> None:
    """A test that fails and whose teardown fails too is one failed test."""
    from versions_steps import outcomes_in

    assert outcomes_in(JUNIT) == {
        "passed": 1,
        "failed": ["a::test_two"],
        "skipped": {"no GPU": 2},
        "xfailed": {"known": 1},
    }


@pytest.mark.usefixtures("benchmarks")
def test_operator_that_torch_itself_refuses_is_no_failure(tmp_path: Path) -> None:
    """An operator that torch refuses counts as refused; any other
    error or value counts as failed.
    """
    from versions_steps import opinfo

    problems = {
        "histogram": "0: NotImplementedError: Could not run with arguments from the 'CUDA' backend",
        "ldexp": "0: RuntimeError: no values",
        "add": "0: value: AssertionError: not close",
    }

    def step(names: list[str], crashed: list[str]) -> dict[str, object]:
        found = {
            "operators": 4,
            "crashed": crashed,
            "different": {name: [problems[name]] for name in names},
            "of_the_cpu": {"uniform": ["0: value: AssertionError: not close"]},
        }

        class Scripted:
            def run(self, script: str, option: str, *arguments: str) -> int:
                Path(option.partition("=")[2]).write_text(json.dumps(found), "utf-8")
                return 0

        return opinfo(Scripted(), None)  # type: ignore[arg-type]

    refused = step(["histogram"], [])
    assert refused["ok"]
    assert refused["refused_by_torch"] == ["histogram"]
    assert refused["agreeing"] == 3
    assert list(refused["of_the_cpu"]) == ["uniform"]  # type: ignore[call-overload]
    assert not step([], ["mul"])["ok"]
    wrong = step(["ldexp", "add", "histogram"], [])
    assert not wrong["ok"]
    assert list(wrong["raising"]) == ["ldexp"]  # type: ignore[call-overload]
    assert list(wrong["other_values"]) == ["add"]  # type: ignore[call-overload]


@pytest.fixture
def options() -> argparse.Namespace:
    """What .ci/against is given to run two steps in an environment that exists."""
    return argparse.Namespace(
        only=["gates", "published"], tests=None, venv=Path(sys.prefix), versions=[]
    )


@pytest.mark.usefixtures("benchmarks")
def test_failing_step_is_recorded_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: argparse.Namespace
) -> None:
    """A failing step is recorded; repeating one step keeps the results of others in the table."""
    import versions
    from versions_tables import skips
    from versions_tables import versions as drawn

    passing = {"ok": True, "exit_status": 0, "passed": 9, "failed": [], "skipped": {"a|b": 2}}
    failing = {"ok": False, "exit_status": 1, "figures": []}
    monkeypatch.setattr(versions, "RESULTS", tmp_path)
    monkeypatch.setitem(versions.STEPS, "gates", lambda *_: dict(passing))
    monkeypatch.setitem(versions.STEPS, "published", lambda *_: dict(failing))
    with versions.reused(options.venv) as environment:
        versions.run(environment, options)
    assert "| 9 |" not in drawn(tmp_path)  # until all versions were run
    versions.finish()
    (file,) = tmp_path.iterdir()
    row = json.loads(file.read_text("utf-8"))
    assert list(row["steps"]) == ["gates", "published"]
    assert not row["steps"]["published"]["ok"]
    assert (row["fresh"], row["complete"]) == (False, False)
    assert "| 9 | not run | 0 |" in drawn(tmp_path)
    assert "| failed |" in drawn(tmp_path)
    figures = [{"figure": "peak", "bytes": 10, "published": 12}]
    monkeypatch.setitem(versions.STEPS, "published", lambda *_: {**passing, "figures": figures})
    monkeypatch.setitem(versions.STEPS, "suite", lambda *_: {**passing, "failed": ["t::a"]})
    options.only = ["suite", "published"]
    with versions.reused(options.venv) as environment:
        versions.run(environment, options)
    versions.finish()
    assert list(json.loads(file.read_text("utf-8"))["steps"]) == ["gates", "suite", "published"]
    assert "| 9 | 9, **1 failed** | 2 |" in drawn(tmp_path)
    assert "| peak: -2 bytes |" in drawn(tmp_path)
    assert "| a\\|b | 2 |" in skips(tmp_path)


@pytest.mark.usefixtures("benchmarks")
def test_row_has_all_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that runs the suite asks for slow tests, too."""
    from versions_steps import Environment, suite

    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(Environment, "pytest", lambda self, *arguments: ran.append(arguments) or {})
    suite(Environment(Path("venv"), Path()), None)
    assert ["--slow" in arguments for arguments in ran] == [True]


@pytest.mark.usefixtures("benchmarks")
def test_trial_writes_no_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: argparse.Namespace
) -> None:
    """A run with chosen tests or with a pre-release of torch writes no row of results."""
    import versions

    monkeypatch.setattr(versions, "RESULTS", tmp_path)
    monkeypatch.setitem(versions.STEPS, "gates", lambda *_: {"ok": True})
    options.only = ["gates"]
    with versions.reused(options.venv) as environment:
        options.tests = ["tests/gates"]
        assert versions.run(environment, options)["steps"]["gates"]["ok"]
        options.tests, options.versions = None, [versions.Versions(versions.PRE_RELEASE)]
        assert versions.run(environment, options)["steps"]["gates"]["ok"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give versions of torch"),
        (["2.9.1", "--venv", "x"], "give versions of torch"),
        (["2.9.1,pyton=3.12"], "'2.9.1,pyton=3.12' is not a version of torch"),
        (["2.9.1,python="], "'2.9.1,python=' is not a version of torch"),
        ([",python=3.12"], "',python=3.12' is not a version of torch"),
        (["2.9.1", "pre-release"], "pre-release writes no row"),
        (["2.9.1", "--only", "nothing"], "invalid choice"),
    ],
)
def test_unclear_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments that contradict each other or lack a version are
    refused before any installation.
    """
    import versions

    with pytest.raises(SystemExit):
        versions.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("benchmarks")
def test_versions_of_a_row_are_read_from_one_argument() -> None:
    """What may follow a version of torch chooses Python, pytest and pytest-xdist."""
    from versions_environments import Versions

    assert Versions.read("newest") == ("newest", None, None, None)
    assert Versions.read("2.9.1,xdist=3.6.1,python=3.10") == ("2.9.1", "3.10", None, "3.6.1")


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("text", ["", "2.9.1,python=/usr/bin/python3", "2.9.1,cuda=12", "2.9.1,"])
def test_what_is_no_version_is_refused_with_what_may_be_written(text: str) -> None:
    """A path of an interpreter is not looked for in folders."""
    from versions_environments import Versions

    with pytest.raises(argparse.ArgumentTypeError, match="is not a version of torch, which may be"):
        Versions.read(text)


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("version", ["2.16.0.dev20270110+cu132", "2.16.0rc1", "2.16.0a0+git12"])
def test_pre_release_is_recognized_by_its_version(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """A pre-release is installed; a release that pip finds in its place is refused by its name."""
    import versions_environments

    def run(*arguments: object, **options: object) -> SimpleNamespace:
        return SimpleNamespace(stdout=json.dumps({"install": [{"metadata": {"version": version}}]}))

    monkeypatch.setattr(versions_environments.subprocess, "run", run)
    versions_environments.check_pre_release(["pip"], {})
    version = "2.15.0"
    with pytest.raises(versions_environments.NotFoundError, match=r"finds is 2\.15\.0, which"):
        versions_environments.check_pre_release(["pip"], {})


@pytest.mark.usefixtures("benchmarks")
def test_interpreter_of_pyenv_is_found_if_none_is_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A row for another Python needs no more than its version; without it the error says so."""
    import versions_environments

    own = "{}.{}".format(*sys.version_info)
    python = tmp_path / "versions" / f"{own}.99" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert versions_environments.interpreter(own) == str(python)
    with pytest.raises(versions_environments.NotFoundError, match=r"there is no python2\.7 on"):
        versions_environments.interpreter("2.7")


@pytest.mark.usefixtures("benchmarks")
def test_environment_without_this_project_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error says what to install; tests would fail there for want of the plugin."""
    import venv

    import versions_environments

    venv.create(tmp_path, with_pip=False, symlinks=True)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    refused = pytest.raises(
        versions_environments.NotFoundError, match=r"pip install -e '.*\[test\]'"
    )
    with refused, versions_environments.reused(tmp_path):
        pass


@pytest.mark.usefixtures("benchmarks")
def test_version_that_cannot_be_installed_fails_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A version that cannot be installed is reported, others still
    run, and the exit status is 1.
    """
    import subprocess
    from contextlib import contextmanager

    import versions

    @contextmanager
    def fresh(asked, index):
        if asked.torch == "0.1":
            raise subprocess.CalledProcessError(1, "install")
        yield None

    # Not the rows of the run that may be running this test, nor this process's handler.
    monkeypatch.setattr(versions, "RESULTS", tmp_path)
    monkeypatch.setattr(versions.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["against", "0.1", "2.9.1"])
    monkeypatch.setattr(versions, "fresh", fresh)
    row = {"torch": "2.9.1", "python": "3.11", "steps": {"gates": {"ok": True}}}
    monkeypatch.setattr(versions, "run", lambda environment, options: row)
    with pytest.raises(SystemExit, match="1"):
        versions.main()
    assert "FAILED torch 0.1: no environment" in capsys.readouterr().out
