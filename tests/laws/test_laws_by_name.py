"""Laws of steps that are given by name: in a process of their own, on an emulated card."""

import pickle
import sys
from pathlib import Path

import pytest

import pytest_cka_memory
from pytest_cka_memory import DeviceError, MemoryProbe, RegionError
from pytest_cka_memory.cli.main import OK, UNUSABLE, main
from pytest_cka_memory.laws import OLDER, WHOLE, Site
from pytest_cka_memory.measure.law_processes import MARK, target_of

pytestmark = pytest.mark.slow

STEPS = """
import torch

class NoTokensError(Exception):
    pass

def step(batch, seq=64):
    hidden = torch.zeros(batch, seq, 1024, device="cuda")
    scores = torch.zeros(batch, seq, seq, device="cuda")
    return torch.softmax(scores, -1), hidden

def cached(calls=1, kept=[]):
    for _ in range(calls):
        kept.append(torch.zeros(1000, device="cuda"))

def on_cpu(batch):
    return torch.zeros(batch, 100).relu()

def fails(batch):
    helper(batch)

def helper(batch):
    raise KeyError("no such token")

def own_error(batch):
    raise NoTokensError("nothing to do")

def stops(batch):
    raise SystemExit(3)

def interrupts(batch):
    raise KeyboardInterrupt

def dies(batch):
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

async def awaited(batch):
    return torch.zeros(batch, device="cuda")

def yields(batch):
    yield torch.zeros(batch, device="cuda")

class Trainer:
    def step(self, batch):
        pass

def too_large(batch):
    return torch.zeros(batch, 2**40, device="cuda")
"""
RELATIVE = """
import torch
from .sizes import WIDTH

def step(batch):
    return torch.zeros(batch, WIDTH, device="cuda")
"""
PARSES = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
WIDTH = parser.parse_args().width

def step(batch):
    return torch.zeros(batch, WIDTH, device="cuda")
"""
CALLS_ITSELF = """
import torch
from pytest_cka_memory import law

def step(batch):
    return torch.zeros(batch, device="cuda")

law(f"{__file__}:step", batch=(1, 2, 4))
"""


@pytest.fixture
def steps(tmp_path: Path, forked_children: None) -> str:
    """Return the name of a file of steps, whose processes are forked."""
    path = tmp_path / "steps.py"
    path.write_text(STEPS)
    return str(path)


@pytest.fixture
def probe() -> MemoryProbe:
    """Return a probe of the CPU: torch is loaded, so no card can be emulated in this process."""
    return MemoryProbe("cpu")


@pytest.mark.emulates
def test_step_by_name_has_the_law_of_an_emulated_card(steps: str, probe: MemoryProbe) -> None:
    """To the byte, with its lines, and it says what was measured."""
    law = probe.law(f"{steps}:step", batch=(1, 2, 4), seq=(64, 128, 256), card="h100")
    assert isinstance(law, pytest_cka_memory.Law)
    assert law.is_exact
    assert str(law.pieces[0]) == "4,096 · batch · seq + 8 · batch · seq²"
    assert (law.degree("batch"), law.degree("seq")) == (1, 2)
    assert law.at(batch=8, seq=512).requested_bytes == 4096 * 8 * 512 + 8 * 8 * 512**2
    lines = [line.partition("/")[2] for term in law.terms for line, _ in term.lines]
    (line,) = [line for line in lines if line.startswith("steps.py:8 in step: ")]
    assert line.endswith('torch.zeros(batch, seq, 1024, device="cuda")')  # up to 3.10 all of it
    head = str(law).partition(", in bytes")[0]
    assert head == "peak on an emulated h100 without values, in a process of its own"
    assert "MemoryProbe" not in repr(law)


@pytest.mark.emulates
def test_further_runs_are_in_such_processes(steps: str) -> None:
    """A doubtful size is run, and the largest batch runs with the memory of a card."""
    law = pytest_cka_memory.law(f"{steps}:step", batch=(1, 2, 4), seq=512, card="a100")
    exact = 512 * 4096 + 8 * 512**2
    assert law.measure(batch=1000) == 1000 * exact
    assert law.at(measure=True, batch=1000).requested_bytes == 1000 * exact
    largest = law.largest("batch", card="t4")
    assert largest.is_verified
    assert f"batch={largest:,} ran in the 14,397 MB of t4" in largest.how
    assert largest.reserved_bytes <= 14_397.5 * 2**20 < (largest + 40) * exact
    alone = law.largest("batch", card="t4", verify=False)
    assert (alone, alone.how) == (largest.by_law, "by the law alone, without a run (verify=False)")


@pytest.mark.emulates
def test_what_is_retained_has_a_law(steps: str, probe: MemoryProbe) -> None:
    """Another figure, and the size that is how often the step is called."""
    law = probe.law(f"{steps}:cached", law_of="retained", calls=(2, 4, 8))
    assert law.growth("calls") == "linear"
    assert str(law.pieces[0]) == "4,000 · calls"


@pytest.mark.emulates
def test_law_can_be_drawn(steps: str) -> None:
    """With the samples of the other process."""
    pytest.importorskip("matplotlib").use("Agg")
    law = pytest_cka_memory.law(f"{steps}:step", batch=(1, 2, 4))
    axes = law.plot("batch")
    assert [line.get_label() for line in axes.lines][-2:] == ["law", "measured"]


@pytest.mark.emulates
def test_step_that_does_not_use_the_card_is_refused(steps: str, tmp_path: Path) -> None:
    """It says what to pass, and with that it measures the CPU."""
    with pytest.raises(RegionError, match=r"does not use emulate:cuda:a100,values=off: .*device="):
        pytest_cka_memory.law(f"{steps}:on_cpu", batch=(1, 2, 4))
    law = pytest_cka_memory.law(f"{steps}:on_cpu", batch=(1, 2, 4), device="cpu")
    assert str(law.pieces[0]) == "800 · batch"
    assert str(law).startswith("peak on cpu, in a process of its own, in bytes")


@pytest.mark.emulates
def test_file_that_uses_the_card_and_a_step_that_does_not_is_noted(
    steps: str, tmp_path: Path
) -> None:
    """A law of nothing says where the step may have run."""
    path = tmp_path / "with_model.py"
    path.write_text(f"{STEPS}\nmodel = torch.zeros(9, device='cuda')\n")
    law = pytest_cka_memory.law(f"{path}:on_cpu", batch=(1, 2, 4))
    assert str(law.pieces[0]) == "0"
    assert str(law).splitlines()[-1] == (
        "note: the step allocates nothing on emulate:cuda:a100,values=off; to run the step "
        "on the CPU, pass device='cpu'"
    )


@pytest.mark.emulates
def test_errors_of_the_step_arrive_with_their_traceback(steps: str) -> None:
    """Those of Python as they are; those of the user's modules are named."""
    with pytest.raises(KeyError, match="no such token") as raised:
        pytest_cka_memory.law(f"{steps}:fails", batch=(1, 2))
    text = str(raised.value.__cause__)
    assert 'steps.py", line 20, in fails\n    helper(batch)' in text
    assert "law_runs.py" not in text
    with pytest.raises(
        RegionError, match="own_error raised NoTokensError: nothing to do"
    ) as raised:
        pytest_cka_memory.law(f"{steps}:own_error", batch=(1, 2))
    assert "in own_error" in str(raised.value.__cause__)
    with pytest.raises(RegionError, match="raised OutOfMemoryError: CUDA out of memory"):
        pytest_cka_memory.law(f"{steps}:too_large", batch=(1, 2))
    with pytest.raises(TypeError, match="the step has no parameter 'heads'; it takes batch"):
        pytest_cka_memory.law(f"{steps}:on_cpu", heads=(1, 2))


@pytest.mark.emulates
def test_step_that_is_not_there_is_named(steps: str) -> None:
    """As for an estimate."""
    with pytest.raises(RegionError, match=r"steps.py has no function 'forward'"):
        pytest_cka_memory.law(f"{steps}:forward", batch=(1, 2))
    with pytest.raises(RegionError, match=r"law\(\): there is no file 'none.py'"):
        pytest_cka_memory.law("none.py:step", batch=(1, 2))


@pytest.mark.emulates
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stepp", "has no function 'stepp', but step"),
        ("zzz", "has no function 'zzz', but step, cached, on_cpu, fails, helper, ..."),
        ("Trainer.step", "write a function at the top of the file that calls it"),
        ("awaited", "awaited is an async function, so a call does not run its code"),
        ("yields", "yields is a generator, so a call does not run its code"),
        ("stops", r"stops ended the process with status 3 at steps.py:\d+; a step must return"),
        ("interrupts", "interrupts raised KeyboardInterrupt"),
        ("dies", "was ended by SIGKILL and said nothing"),
    ],
)
def test_name_that_is_no_step_is_explained(steps: str, name: str, message: str) -> None:
    """With what to write instead, or how it ended; an interruption is not for this process."""
    with pytest.raises(RegionError, match=message):
        pytest_cka_memory.law(f"{steps}:{name}", batch=(1, 2))


@pytest.mark.emulates
def test_file_of_a_package_is_named_as_a_module(tmp_path: Path, forked_children: None) -> None:
    """A file with relative imports does not run by its path."""
    package = tmp_path / "nets"
    package.mkdir()
    for name, text in (("__init__", ""), ("sizes", "WIDTH = 8\n"), ("tiny", RELATIVE)):
        (package / f"{name}.py").write_text(text)
    with pytest.raises(
        RegionError, match=r"has relative imports.*'nets.tiny:step', and run this in the folder"
    ):
        pytest_cka_memory.law(f"{package / 'tiny.py'}:step", batch=(1, 2))
    with pytest.raises(RegionError, match=r"there is no module 'no_such\.thing'"):
        pytest_cka_memory.law("no_such.thing:step", batch=(1, 2))


@pytest.mark.emulates
def test_file_that_reads_the_command_line_gets_an_empty_one(
    tmp_path: Path, forked_children: None
) -> None:
    """Not what this package tells its own process; an option it requires ends it in one line."""
    path = tmp_path / "parses.py"
    path.write_text(PARSES)
    law = pytest_cka_memory.law(f"{path}:step", batch=(1, 2))
    assert str(law.pieces[0]) == "32 · batch"
    path.write_text(PARSES.replace("default=8", "required=True"))
    with pytest.raises(RegionError, match=r"ended the process with status 2 at parses\.py:5;"):
        pytest_cka_memory.law(f"{path}:step", batch=(1, 2))


@pytest.mark.emulates
def test_function_is_emulated_only_if_it_is_asked_for(
    steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measured device is never exchanged in silence."""
    monkeypatch.syspath_prepend(str(Path(steps).parent))
    monkeypatch.delitem(sys.modules, "steps", raising=False)
    module = __import__("steps")
    probe = MemoryProbe("cpu")
    here = probe.law(module.on_cpu, batch=(1, 2, 4))
    assert (here.device, here.elsewhere) == ("cpu", "")
    emulated = probe.law(module.step, batch=(1, 2, 4), device="emulate:cuda:t4,values=off")
    assert emulated.elsewhere == "emulate:cuda:t4,values=off"
    assert str(emulated.pieces[0]) == f"{64 * 4096 + 8 * 64**2:,} · batch"
    monkeypatch.delitem(sys.modules, "steps")


def test_function_that_another_process_cannot_import_is_refused() -> None:
    """A lambda, a function in a function, and one with a closure."""
    for step in (lambda batch: batch, print, MemoryProbe.law):
        with pytest.raises(ValueError, match=r"pass its name, e\.g\. 'train\.py:step'"):
            target_of(step, None, "emulate:cuda:h100")


def test_arguments_of_a_function_are_its_own(probe: MemoryProbe) -> None:
    """A step may have an argument `device` or `card`; one that has none is an error."""
    torch = pytest.importorskip("torch")

    def step(batch, device, card):
        assert card == "ace"
        return torch.zeros(batch, device=device)

    law = probe.law(step, batch=(1, 2, 4), device="cpu", card="ace")
    assert str(law.pieces[0]) == "4 · batch"
    with pytest.raises(TypeError, match="the step has no parameter 'card'"):
        probe.law(lambda batch: torch.zeros(batch), batch=(1, 2, 4), card="h100")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("train.py", None, None), ValueError, "write 'FILE.py:FUNCTION' or 'MODULE:FUNCTION'"),
        (("train.py:step", "h900", None), DeviceError, "unknown card 'h900'"),
        (("train.py:step", "t4", "cpu"), ValueError, "write only one of the two"),
    ],
)
def test_wrong_arguments_are_refused_before_a_process_starts(arguments, error, message) -> None:
    """The error says what to write."""
    with pytest.raises(error, match=message):
        target_of(*arguments)


def test_argument_that_cannot_be_passed_is_refused() -> None:
    """An object of this process is none of the other's."""
    with pytest.raises(TypeError, match="pass values that can be pickled"):
        pytest_cka_memory.law("train.py:step", batch=(1, 2), loss=lambda x: x)


@pytest.mark.emulates
def test_file_that_asks_for_its_own_law_starts_no_further_process(
    tmp_path: Path, forked_children: None
) -> None:
    """Otherwise each process would start another one."""
    path = tmp_path / "own.py"
    path.write_text(CALLS_ITSELF)
    with pytest.raises(RegionError, match="put the call under if __name__ == '__main__'"):
        pytest_cka_memory.law(f"{path}:step", batch=(1, 2, 4))


def test_name_is_refused_in_the_process_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that marks it."""
    monkeypatch.setenv(MARK, "1")
    with pytest.raises(RegionError, match=r"law\('train.py:step'\) was called again by the"):
        target_of("train.py:step", None, None)


def test_sites_that_are_known_by_identity_stay_themselves() -> None:
    """What comes from another process is compared with ``is``; an equal site is another one."""
    assert pickle.loads(pickle.dumps(WHOLE)) is WHOLE
    assert pickle.loads(pickle.dumps((OLDER, 1)))[0] is OLDER
    other = Site(())
    assert pickle.loads(pickle.dumps(other)) == other
    assert pickle.loads(pickle.dumps(other)) is not WHOLE


@pytest.mark.emulates
def test_command_prints_the_law(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With a prediction, or the largest size that fits a card."""
    name = f"{steps}:step"
    assert main(["law", name, "batch=1,2,4", "seq=512", "--card", "h100", "--at", "batch=8"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "peak = 4,194,304 · batch"
    assert lines[-1].startswith("batch=8: 33,554,432 bytes (32.00 MB), extrapolated")
    assert main(["law", name, "batch=1,2,4", "--largest", "batch", "--fits", "t4"]) == OK
    assert " ran in the 14,397 MB of t4" in capsys.readouterr().out


@pytest.mark.emulates
def test_command_names_what_is_wrong(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of the step with its traceback, and sizes that are none."""
    assert main(["law", f"{steps}:fails", "batch=1,2"]) == UNUSABLE
    printed = capsys.readouterr().err
    assert "in helper" in printed
    assert printed.splitlines()[-1] == "pytest_cka_memory: KeyError: 'no such token'"
    assert main(["law", f"{steps}:step", "8"]) == UNUSABLE
    assert "'8' is not a size; write NAME=VALUES" in capsys.readouterr().err
    assert main(["law", f"{steps}:own_error", "batch=1,2"]) == UNUSABLE
    printed = capsys.readouterr().err
    assert "in own_error" in printed
    assert printed.splitlines()[-1].endswith("own_error raised NoTokensError: nothing to do")
    assert main(["law", f"{steps}:step", "batch=1,2", "batch=4"]) == UNUSABLE
    assert "'batch' is given twice; write all its values together" in capsys.readouterr().err
