"""The comparison with real cards: cases are complete, and predictions come before comparisons."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CASES = sorted(
    file.stem
    for file in (BENCHMARKS / "real_cards" / "cases").glob("*.py")
    if not file.stem.startswith("_")
)


@pytest.fixture
def real_cards(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of cases; its folder and that of the scripts can be imported from."""
    folders = [BENCHMARKS / "real_cards", BENCHMARKS, BENCHMARKS / "real_cards" / "cases"]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])
    import case

    return case


@pytest.mark.parametrize("name", CASES)
def test_case_says_where_its_figures_come_from_and_what_they_count(
    real_cards: ModuleType, name: str
) -> None:
    """Each case has a source with an address, a known card, and figures with digits and a unit."""
    from emulated_cuda.cards import CARDS

    case = real_cards.load(name)
    assert case.source.startswith("https://")
    assert case.card in CARDS
    assert case.real
    assert case.runs
    assert real_cards.summary(name).endswith(".")
    for figure in case.figures.values():
        assert figure.published_bytes > 0
        assert figure.unit in real_cards.UNITS
        assert (figure.kind or case.kind) in real_cards.KINDS
        assert figure.counts in {"allocated", "peak allocated", "reserved", "peak reserved"}


def test_results_have_only_figures_that_were_published(real_cards: ModuleType) -> None:
    """A prediction that no published figure belongs to would never be compared."""
    results = json.loads((BENCHMARKS / "results" / "real-cards.json").read_text("utf-8"))
    assert set(results) <= set(CASES)
    for name, found in results.items():
        case = real_cards.load(name)
        assert set(found.get("failed", {})) <= set(case.runs)
        left_out = {"compiled, 16 wide, 256 long"}  # the source's table lacks this one row
        assert set(found["figures"]) - left_out <= set(case.figures), name


def test_case_that_takes_over_ten_minutes_says_why(real_cards: ModuleType) -> None:
    """Ten minutes on two cores are the limit of a case without a reason."""
    results = json.loads((BENCHMARKS / "results" / "real-cards.json").read_text("utf-8"))
    slow = {name for name, found in results.items() if sum(found["seconds"].values()) > 600}
    assert {name for name in slow if not real_cards.load(name).takes} == set()


@pytest.mark.parametrize(
    ("printed", "found", "equal"),
    [("24.7739", 24.77394, True), ("24.7739", 24.77396, False), ("4129", 4128.6, True)],
)
def test_figure_is_equal_if_its_digits_are(
    real_cards: ModuleType, printed: str, found: float, equal: bool
) -> None:
    """A prediction equals a published figure if it is the same when printed with as many digits."""
    figure = real_cards.Figure(printed, "MiB")
    assert figure.is_equal(found * 2**20) is equal
    assert figure.error(2 * figure.published_bytes) == 1


def test_first_prediction_of_a_figure_stays(
    real_cards: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program that is corrected after a comparison is no longer blind: both figures are kept."""
    import run

    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    found: dict[str, Any] = {"torch": "2.14.1", "seconds": 1.0, "figures": {"peak": 100}}
    run.note("case", "all", found)
    run.note("case", "all", {**found, "figures": {"peak": 90, "end": 10}})
    figures = run.stored()["case"]["figures"]
    assert (figures["peak"]["first_bytes"], figures["peak"]["bytes"]) == (100, 90)
    assert figures["end"]["first_bytes"] == figures["end"]["bytes"] == 10


def test_reserve_with_late_events_stands_beside_the_prediction(
    real_cards: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The upper end is of reserves alone, and makes no first prediction."""
    import run

    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    found: dict[str, Any] = {"torch": "2.14.1", "seconds": 1.0}
    reserve, level = "lora, reserve", "lora, allocated after a step"
    run.note("peft_image_generation", "lora", {**found, "figures": {reserve: 100, level: 50}})
    run.note_late("peft_image_generation", {"figures": {reserve: 130, level: 50, "other": 1}})
    figures = run.stored()["peft_image_generation"]["figures"]
    assert figures[reserve]["late_bytes"] == 130
    assert (figures[reserve]["first_bytes"], figures[reserve]["bytes"]) == (100, 100)
    assert "late_bytes" not in figures[level]
    assert set(figures) == {reserve, level}


def test_figure_between_lower_and_upper_reserve_is_in_the_range(real_cards: ModuleType) -> None:
    """A published reserve may lie anywhere between that at once and that with late events."""
    from real_cards_tables import Compared

    case = real_cards.load("growth_doplxyz")
    figure = real_cards.Figure("120", "bytes", "reserved")
    rows = [Compared(case, "r", figure, 100, True, late) for late in ((), (119,), (120,), (130,))]
    assert [row.is_in_range for row in rows] == [False, False, True, True]


def test_failed_run_is_noted_with_its_reason_until_it_succeeds(
    real_cards: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The page lists runs without a figure, with the error that ended them."""
    import run

    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    output = "  File ...\nRuntimeError: no such kernel\nemulated_cuda: run.py: ended early"
    run.note("case", "all", {"failed": output})
    assert run.stored()["case"]["failed"] == {"all": "RuntimeError: no such kernel"}
    run.note("case", "all", {"torch": "2.14.1", "seconds": 1.0, "figures": {"peak": 100}})
    assert run.stored()["case"]["failed"] == {}


def test_case_runs_with_the_nearest_torch_that_has_its_packages(
    real_cards: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A case of torch 2.6 runs with 2.9, unless only another interpreter has what it needs."""
    import run

    installed = {"old": "2.9.1+cu128 numpy", "new": "2.14.1 numpy"}

    def asked(command: list[str], **_: object) -> str:
        version, *packages = installed[command[0]].split()
        return " ".join([version, *(name for name in command[3:] if name in packages)])

    monkeypatch.setattr(run.subprocess, "check_output", asked)
    case = real_cards.load("attention_damek")
    assert run.chosen(case, list(installed)) == "old"
    needy = real_cards.load("peft_image_generation")
    monkeypatch.setitem(installed, "new", "2.14.1 diffusers transformers accelerate")
    assert run.chosen(needy, list(installed)) == "new"
    with pytest.raises(SystemExit, match="no interpreter has diffusers, transformers, accelerate"):
        run.chosen(needy, ["old"])


def test_only_the_named_parts_of_a_program_are_written(
    real_cards: ModuleType, tmp_path: Path
) -> None:
    """A case gets the files of a commit that it names, from a copy of the repository."""
    import sources

    folder = tmp_path / "owner+name"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "program.py").write_text("print(1)\n", "utf-8")
    (folder / "other.py").write_text("print(2)\n", "utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    found = sources.git_directory(tmp_path, "owner/name")
    sources.extract(found, "HEAD", ["part"], tmp_path / "into")
    written = [path for path in (tmp_path / "into").rglob("*") if path.is_file()]
    assert [path.read_text("utf-8") for path in written] == ["print(1)\n"]
    with pytest.raises(SystemExit, match="no git directory of owner/another"):
        sources.git_directory(tmp_path, "owner/another")


def test_case_with_a_program_of_its_source_is_left_out_without_copies(
    real_cards: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without ``--sources`` such a case says which repositories it needs, and runs nothing."""
    import run

    monkeypatch.setattr(run, "chosen", lambda case, interpreters: sys.executable)
    monkeypatch.setattr(run, "predict", None)
    monkeypatch.setattr(sys, "argv", ["run.py", "transformer_gaoyue"])
    run.main()
    assert "it needs --sources with GAOYUEtianc/Stanford-CS336-assignments@" in (
        capsys.readouterr().out
    )


def test_another_file_of_results_is_written_instead(
    real_cards: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With ``--json``, as a part is measured to be compared, the stored predictions stay."""
    import run

    before = {"growth_doplxyz": {"figures": {}}}
    stored, written = tmp_path / "stored.json", tmp_path / "part.json"
    stored.write_text(json.dumps(before), "utf-8")
    monkeypatch.setattr(run, "RESULTS", stored)
    monkeypatch.setattr(run, "chosen", lambda case, interpreters: sys.executable)
    found = {"torch": "2.14.1", "seconds": 1.0, "figures": {"peak": 100}}
    monkeypatch.setattr(run, "predict", lambda *arguments, **named: found)
    monkeypatch.setattr(sys, "argv", ["run.py", "growth_doplxyz", "--json", str(written)])
    run.main()
    (figures,) = [it["figures"] for it in json.loads(written.read_text("utf-8")).values()]
    assert figures["peak"]["bytes"] == 100
    assert json.loads(stored.read_text("utf-8")) == before


def test_reserves_with_other_addresses_stand_beside_the_prediction(
    real_cards: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The replays' reserves belong to the one figure of a process that counts its reserve."""
    import run

    monkeypatch.setattr(run, "RESULTS", tmp_path / "results.json")
    case = real_cards.load("transformer_gaoyue")
    (name, _), *_rest = case.figures.items()
    process = name.rpartition(", ")[0]
    reserve = f"{process}, reserved"
    found: dict[str, Any] = {
        "torch": "2.6.0",
        "seconds": 1.0,
        "figures": {f"{process}, allocated": 50, reserve: 100},
    }
    run.note("transformer_gaoyue", process, found)
    monkeypatch.setattr(run, "predict", lambda *arguments, **named: found)
    monkeypatch.setattr(run.subprocess, "check_output", lambda *a, **n: "[100, 120]")
    run.note_other_addresses("transformer_gaoyue", case, process, "python", "", 2)
    figures = run.stored()["transformer_gaoyue"]["figures"]
    assert figures[reserve]["other_addresses_bytes"] == [100, 120]
    found["figures"] = {f"{process}, allocated": 50}
    with pytest.raises(SystemExit, match="0 figures of the reserve at its end"):
        run.note_other_addresses("transformer_gaoyue", case, process, "python", "", 2)
