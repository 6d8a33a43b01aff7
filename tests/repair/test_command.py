"""``python -m pytest_cka_memory repair``: the sessions it starts, and what it prints."""

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from emulated_cuda.torch_versions import allocator_variable
from pytest_cka_memory.cli import Session
from pytest_cka_memory.cli.main import OK, REGRESSION, UNUSABLE, main
from pytest_cka_memory.cli.repair import Proof
from pytest_cka_memory.plugin.repair_session import MEASURE, Task
from pytest_cka_memory.repair.programs import check_named_files
from pytest_cka_memory.reports.html.page import render_repairs

BRIEFLY = ("--seconds", "6")
"""Of processor time: enough to try each change alone."""
MODEL = Path(__file__).with_name("small_models.py")
TEST = """
import pytest
import small_models


@pytest.mark.max_peak_mb(1)
def test_step(cka_memory):
    with cka_memory.measure("train"):
        small_models.train(batch=4)


def test_wrong():
    raise ValueError("on purpose")
"""


@pytest.fixture
def folder(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, forked_children: None
) -> Path:
    """Return a folder with a model and its tests, which is the current one. Sessions are forked."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly")
    pytester.makepyfile(test_it=TEST)
    (pytester.path / "small_models.py").write_text(MODEL.read_text("utf-8"), "utf-8")
    return pytester.path


@pytest.mark.slow
def test_repairs_are_printed_and_proven(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The patched copy of the cheapest change has the predicted peak, and equal numbers."""
    given = ("test_it.py::test_step", "--device", "cpu", "--to", "4MB", "--prove", *BRIEFLY)
    status = main(["repair", *given])
    out, progress = capfd.readouterr()
    assert status == OK, progress
    assert "test_it.py::test_step: what lowers the peak, measured on cpu" in out
    assert re.search(r"^\d\.\d\d.* checkpoint every Block$", out, re.MULTILINE)
    cheapest = re.search(r"^cheapest change that fits 4.00 MB: (.+?) \(", out, re.MULTILINE)
    assert cheapest is not None
    assert f"proven: {cheapest[1]}: the patched copy has the peak" in out
    assert "not proven" not in out
    assert "THEY DIFFER" not in out
    assert re.search(r"^results: (equal, bit for bit|the last digits differ)", out, re.MULTILINE)
    assert "as it is" in progress
    assert "_repaired" not in " ".join(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_budget_that_nothing_meets(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A budget below every trial's peak has an answer, too: the lowest that was found."""
    given = ("test_it.py::test_step", "--device", "cpu", "--to", "0.1")
    status = main(["repair", *given, *BRIEFLY])
    out, _ = capfd.readouterr()
    assert status == OK
    # There may be no time to try everything.
    answer = (
        r"^(the step does not fit 0\.10 MB with any|no change that was tried fits 0\.10 MB).*; "
    )
    assert re.search(answer, out, re.MULTILINE)


def test_search_without_time_does_not_say_that_nothing_fits() -> None:
    """Without the time to try everything, the report only says that nothing has fitted so far."""
    from pytest_cka_memory.repair.report import Repairs, as_text
    from pytest_cka_memory.repair.trials import Figures, Trial

    found = Repairs(Trial((), Figures(3 * 2**20, None)), budget_bytes=2**20)
    assert "no change that was tried fits 1.00 MB" in as_text(found, device="cpu")
    found.is_complete = True
    assert "does not fit 1.00 MB with any change" in as_text(found, device="cpu")


@pytest.mark.parametrize(
    ("reserved_mb", "is_conditional"), [(2, False), (3, True)], ids=["within", "above"]
)
def test_what_fits_depends_on_the_reserve_if_that_is_larger(
    reserved_mb: int, is_conditional: bool
) -> None:
    """A trial with more memory may keep free blocks that the budget has no room for."""
    from pytest_cka_memory.repair.report import Repairs, as_text
    from pytest_cka_memory.repair.trials import Change, Figures, Trial

    found = Repairs(Trial((), Figures(9 * 2**20, 9 * 2**20)), budget_bytes=2**21)
    change = Change("less", "any", contextlib.nullcontext)
    found.trials.append(Trial((change,), Figures(2**20, reserved_mb * 2**20)))
    text = as_text(found, device="cpu")
    assert "cheapest change that fits 2.00 MB: less (1.00 MB)\n" in text
    condition = "memory; with more memory free, it reserved 3.00 MB here"
    assert (condition in text) is is_conditional


def test_what_reserves_too_much_is_beside_what_fits_in_any_case() -> None:
    """The cheapest change may not fit the card itself: then another one is written out, too."""
    from pytest_cka_memory.repair.report import Repairs, as_text, recommended
    from pytest_cka_memory.repair.trials import Change, Figures, Trial

    found = Repairs(Trial((), Figures(9 * 2**20, 9 * 2**20)), budget_bytes=4 * 2**20)
    for name, peak_mb, reserved_mb in (("less", 3, 5), ("least", 1, 4), ("wide", 2, 6)):
        change = Change(name, "any", contextlib.nullcontext, recomputes=name != "less")
        found.trials.append(Trial((change,), Figures(peak_mb * 2**20, reserved_mb * 2**20)))
    cheapest = found.fitting[0].name
    assert cheapest == "less"
    assert [trial.name for trial in recommended(found)] == ["less", "least"]
    text = as_text(found, device="cpu")
    assert "cheapest change whose reserved memory fits, too: least (1.00 MB, 4.00 MB reserved)" in (
        text
    )


@pytest.mark.parametrize("budget", [None, 2**20, 9 * 2**20], ids=["none", "small", "fits"])
def test_rows_that_are_asked_for_are_written_out_too(budget: int | None) -> None:
    """``--also`` names a row of the table; a name that is none is mentioned."""
    from pytest_cka_memory.repair.report import Repairs, as_text, recommended
    from pytest_cka_memory.repair.trials import Change, Figures, Trial

    found = Repairs(Trial((), Figures(9 * 2**20, None)), budget_bytes=budget)
    for name, peak_mb in (("less", 3), ("least", 1), ("more", 8)):
        change = Change(name, name, contextlib.nullcontext, advice=f"write {name}")
        found.trials.append(Trial((change,), Figures(peak_mb * 2**20, None)))
    assert "more" not in [trial.name for trial in recommended(found)]
    found.also = ("more", "none")
    assert [trial.name for trial in recommended(found)][-1] == "more"
    text = as_text(found, device="cpu")
    assert "more: write more" in text
    assert "--also 'none': no change of this name ran" in text


def test_test_that_fails_as_it_is(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A test that fails before it needs memory is named with its error."""
    status = main(["repair", "test_it.py::test_wrong", "--device", "cpu"])
    assert status == REGRESSION
    error = "test_it.py::test_wrong: ValueError: on purpose (at test_it.py:12 in test_wrong)"
    assert error in capfd.readouterr()[0]


def test_card_that_is_not_known(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The known ones are listed at once, as by the other commands."""
    with pytest.raises(SystemExit) as end:
        main(["repair", "--card", "rtx4900", "test_it.py"])
    assert end.value.code == UNUSABLE
    assert re.search("--card: invalid choice: 'rtx4900' .*rtx4090", capfd.readouterr()[1])


def test_values_of_options_of_pytest_are_no_files() -> None:
    """They may name what is to be written or left out."""
    check_named_files(["-o", "python_files=a.py", "--ignore", "none.py", "--log-file=none.py", "."])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no test is named; write e.g. repair tests/test_train.py::test_step"),
        (["test_it.py", "--to", "much"], "cannot read 'much' as a memory size"),
        (["test_it.py", "--to", "rtx4900"], "or the name of a card: a100,"),
        (["test_it.py", "-k", "nothing", "--device", "cpu"], "ran no test"),
        (
            ["--card", "t4", "smal_models.py", "--steps", "2"],
            "there is no file 'smal_models.py', but there is 'small_models.py'",
        ),
        (["tests/test_it.py::test_step"], "there is no file 'tests/test_it.py'"),
        (["test_none.py", "--device", "cpu"], "there is no file 'test_none.py'"),
        (["test_it.py:test_step"], "is neither a script nor a test"),
        (["test_it.py:test_step"], "two colons, such as test_it.py::test_step"),
    ],
    ids=[
        *("no-test", "no-size", "no-card", "none-chosen", "misspelt", "no-folder", "no-file"),
        *("a-function", "how-to-name-it"),
    ],
)
def test_arguments_that_cannot_be_used(
    folder: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """The command says what is wrong with its arguments, and ends with status 2."""
    assert main(["repair", *arguments]) == UNUSABLE
    assert message in " ".join(capfd.readouterr()[1].split())


def test_interrupted_search_returns_what_is_known() -> None:
    """Ctrl-C in a trial ends the search; what was tried before is in the report."""
    from pytest_cka_memory.repair.search import Search
    from pytest_cka_memory.repair.trials import Figures

    sys.path.insert(0, str(MODEL.parent))
    import small_models

    runs = []

    def run() -> Figures:
        runs.append(1)
        if len(runs) == 4:
            raise KeyboardInterrupt
        small_models.train(steps=1, batch=2)
        return Figures(1000 - len(runs), None)

    lines: list[str] = []
    search = Search(run, lambda error: False, progress=lines.append)
    found = search.search()
    assert found.was_interrupted
    assert not found.is_complete
    assert [trial.name for trial in found.ran] == ["checkpoint every Block"]
    assert lines[-1] == "interrupted: this is what is known so far"


@pytest.mark.native
@pytest.mark.slow
def test_page_draws_memory_before_and_after(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The page has a curve of the test as it is, one of the recommended change, and the budget."""
    given = ("--device", "cpu", "--to", "4MB", "--seconds", "4", "--html", "page.html", "--quiet")
    assert main(["repair", "test_it.py::test_step", *given]) == OK
    out, _ = capfd.readouterr()
    page = (folder / "page.html").read_text("utf-8")
    figure, *_ = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    cheapest = re.search(r"^cheapest change that fits 4.00 MB: (.+?) \(", out, re.MULTILINE)
    assert cheapest is not None
    peak = re.search(r"^(\d\.\d\d) .* as it is$", out, re.MULTILINE)
    assert peak is not None
    assert f"as it is: {peak[1]} MB" in figure
    assert f"{cheapest[1]}: " in page
    assert "budget: 4.00 MB" in figure
    assert len(re.findall(r"<path class='(?:was|now)' d='M0,\d+\.\d\dH\d", figure)) == 2
    assert "wrote page.html" in out


def test_page_names_a_script_as_it_was_given() -> None:
    """The test that runs a script is in a temporary folder, whose name says nothing."""
    page = render_repairs(
        [{"test": "/tmp/x/test_script.py::test_script", "label": "train.py -b 8", "text": "found"}]
    )
    assert "<h2>train.py -b 8</h2>" in page
    assert "test_script" not in page


class Failing(Session):
    """Sessions in which the test fails on the second of two ranks."""

    def results(self, task: Task, **_: Any) -> list[dict[str, Any]]:
        assert task.ranks == 2
        return [{"peak_bytes": 1, "ranks": [{"peak_bytes": 1}, {"error": "ValueError: no"}]}]


def test_ranks_that_do_not_run_are_named_with_the_command_to_run_them(tmp_path: Path) -> None:
    """A copy for several cards that fails is not proven; the user can start its ranks himself."""
    each = {"name": "fully_shard", "cards": 2, "peak_bytes": 1, "numbers": "", "files": {"a": ""}}
    session = Failing("emulate:cuda:h100,devices=2,values=off", [])
    proof = Proof(session, {"test": "test_it.py::test_step"}, 1.0)
    assert proof.peak(each, tmp_path) == (
        "not proven: fully_shard: the patched copy does not run: ValueError: no; write the patch "
        "and run: torchrun --standalone --nproc-per-node=2 -m pytest --cka-memory-report "
        "--cka-memory-device=emulate:cuda:h100,devices=2,values=off test_it.py::test_step",
        False,
    )


class FullCard(Session):
    """A session in which a copy runs on the large card, and on the small one if it says so."""

    fits_small = True

    def results(self, task: Task, *, device: str | None = None, **_: Any) -> list[dict[str, Any]]:
        assert device == "emulate:cuda:t4,values=off"
        if not self.fits_small:
            return [{"error": f"torch.OutOfMemoryError: CUDA out of memory. {'Long. ' * 40}"}]
        return [{"peak_bytes": 2**20, "reserved_bytes": 2 * 2**20}]


@pytest.mark.parametrize(
    ("fits", "line"),
    [
        (
            True,
            "proven: del x: the patched copy runs on emulate:cuda:t4,values=off, with a peak of "
            "1.00 MB and 2.00 MB reserved",
        ),
        (
            False,
            "not proven: del x: on emulate:cuda:t4,values=off: torch.OutOfMemoryError: CUDA out of "
            f"memory. {'Long. ' * 26}If its reserved memory is fragmented, "
            f"{allocator_variable()}=expandable_segments:True helps",
        ),
    ],
    ids=["fits", "full"],
)
def test_copy_is_also_run_on_the_card_that_was_full(tmp_path: Path, fits: bool, line: str) -> None:
    """A peak below the card's memory is no proof: its allocator may need more than the peak."""
    session = FullCard("emulate:cuda:h100-nvl,values=off", [])
    session.card_that_was_full = "emulate:cuda:t4,values=off"
    session.fits_small = fits
    proof = Proof(session, {"test": "test_it.py::test_step"}, 1.0)
    assert proof.fit_on_card({"name": "del x", "cards": 1}, tmp_path) == (line, fits)


class Measuring(Session):
    """Sessions in which the peak of a copy is what the copied file says."""

    def results(self, task: Task, *, folder: Path | None = None, **_: Any) -> list[dict[str, Any]]:
        if task.mode != MEASURE:
            return [{"error": "no values here"}]
        assert folder is not None
        size = int((folder / "size.txt").read_text("utf-8"))
        return [{"peak_bytes": size, "ranks": [{"peak_bytes": size}]}]


@pytest.mark.parametrize(
    ("peaks", "holds", "tried"),
    [((1, 9, 9), True, ["a"]), ((9, 1, 9), True, ["a", "b"]), ((9, 9, 9), False, ["a", "b", "c"])],
    ids=["recommended", "next", "none"],
)
def test_next_change_that_fits_is_proven_if_no_recommended_one_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    peaks: tuple[int, ...],
    holds: bool,
    tried: list[str],
) -> None:
    """Each change is predicted to have a peak of 1 byte; the proof goes on until one has it."""
    monkeypatch.chdir(tmp_path)
    Path("size.txt").write_text("9", "utf-8")
    changes = [
        {
            "name": name,
            "cards": 1,
            "peak_bytes": 1,
            "numbers": "",
            "files": {str(tmp_path / "size.txt"): str(peak)},
            "text": f"write {name}",
        }
        for name, peak in zip("abc", peaks, strict=True)
    ]
    answer = {
        "test": "test_it.py::test_step",
        "sizes": (0, 0),
        "recommended": changes[:1],
        "next": changes[1:],
    }
    session = Measuring("emulate:cuda:t4,values=off", [])
    assert Proof(session, answer, 1.0).is_held() == holds
    out, err = capsys.readouterr()
    assert [name for name in "abc" if f"proven: {name}: " in out] == tried
    assert [name for name in "bc" if f"change that fits: write {name}" in out] == tried[1:]
    assert re.search(rf"^\[\d+:\d\d\] proving {tried[-1]}: the peak", err, re.MULTILINE)


@pytest.mark.parametrize(
    ("answer", "holds"),
    [
        ({"budget_bytes": 1}, False),
        ({"budget_bytes": 1, "fits_as_it_is": True}, True),
        ({"budget_bytes": None}, True),
    ],
    ids=["nothing fits", "fits as it is", "nothing is lower"],
)
def test_without_a_recommended_change_something_may_still_be_missing(
    answer: dict[str, Any], holds: bool
) -> None:
    """If nothing fits the budget, nothing is proven, and the command ends with status 1."""
    whole = {"test": "test_it.py::test_step", "recommended": [], **answer}
    assert Proof(Measuring("cpu", []), whole, 1.0).is_held() == holds
