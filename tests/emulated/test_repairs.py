"""Changes that are tried on an emulated card only: programs need what their trials predict."""

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_cka_memory.cli import Session
from pytest_cka_memory.cli.repair import Proof
from pytest_cka_memory.units import format_exact

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        return x + self.inner(self.norm(x).transpose(0, 1)).transpose(0, 1)


class Model(nn.Module):
    def __init__(self, width=256, words=500):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, words)

    def forward(self, text):
        x = self.words(text)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text.flatten())


def step():
    model = Model().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    text = torch.zeros(4, 128, dtype=torch.long, device="cuda")
    for _ in range(2):
        model(text).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

TRIALS = """
import json, sys
import emulated_cuda
emulated_cuda.load("a100", devices=int(sys.argv[2]), values=False)
sys.path.insert(0, sys.argv[1])
import program, torch
from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.repair.changes import offered
from pytest_cka_memory.repair import patched
from pytest_cka_memory.repair.observation import observing
from pytest_cka_memory.repair.trials import Figures, tried

with observing() as observed:
    observed.has_values, observed.cards = False, int(sys.argv[2])
    program.step()
before = program.Model.__init__, program.Model.forward, torch.optim.AdamW.__init__
changes, refusals = offered(observed)
chosen = {change.name: change for change in changes}
found = {}

def run():
    region = MemoryProbe("cuda").run(program.step)
    return Figures(region.peak_bytes, None)

base = tried([], run, lambda error: False)
for names in json.loads(sys.argv[3]):
    trial = tried([chosen[name] for name in names], run, lambda error: False)
    (text,) = patched(trial.edits).values()
    found["+".join(names)] = trial.error or trial.peak_bytes, text
after = program.Model.__init__, program.Model.forward, torch.optim.AdamW.__init__
print(json.dumps({
    "base": base.peak_bytes, "again": tried([], run, lambda error: False).peak_bytes,
    "found": found, "clean": before == after, "group": torch.distributed.is_initialized(),
    "offered": sorted(chosen), "numbers": {name: chosen[name].numbers for name in chosen},
}))
"""

RUN = """
import sys
import emulated_cuda
emulated_cuda.load("a100", values=False)
sys.path.insert(0, sys.argv[1])
import program
from pytest_cka_memory import MemoryProbe
print(MemoryProbe("cuda").run(program.step).peak_bytes)
"""

RANK = """
sys.path.insert(0, FOLDER)
import program
from pytest_cka_memory import MemoryProbe
print(MemoryProbe(f"cuda:{rank}").run(program.step).peak_bytes)
dist.destroy_process_group()
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


def _written(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "program.py").write_text(text, encoding="utf-8")
    return str(folder)


def _trials(python: Run, folder: str, devices: int, *names: list[str]) -> dict[str, object]:
    ran = python("-c", TRIALS, folder, str(devices), json.dumps(names), forked=True)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_sharded_program_needs_on_each_of_two_ranks_what_was_tried_in_one_process(
    python: Run, nccl: Callable[..., list[subprocess.CompletedProcess[str]]], tmp_path: Path
) -> None:
    """The peak of ranks that communicate is the prediction, to the byte: alone and combined."""
    alone = ["fully_shard over 2 cards"]
    found = _trials(
        python, _written(tmp_path / "as_it_is", MODEL), 2, alone, [*alone, "checkpoint every Block"]
    )
    assert found["clean"]
    assert not found["group"]
    assert found["base"] == found["again"]
    peaks = []
    for name, (peak, text) in found["found"].items():  # type: ignore[attr-defined]
        folder = _written(tmp_path / f"of {len(name)} letters", text)
        runs = nccl(RANK.replace("FOLDER", repr(folder)), values="off")
        assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
        assert [int(run.stdout.splitlines()[-1]) for run in runs] == [peak, peak]
        peaks.append(peak)
    assert found["base"] > peaks[0] > peaks[1]


@pytest.mark.slow
def test_sharded_copy_is_proven_on_as_many_ranks(
    python: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    forked_children: None,
) -> None:
    """``--prove`` starts torchrun: each rank has the predicted peak, and the gradients whose parts
    the ranks have are those of one card.
    """
    name = "fully_shard over 2 cards"
    folder = _written(tmp_path / "as_it_is", MODEL)
    trials = _trials(python, folder, 2, [name])
    ((peak, text),) = trials["found"].values()  # type: ignore[attr-defined]
    test = "import program\n\n\ndef test_step(cka_memory):\n    program.step()\n"
    Path(folder, "test_it.py").write_text(test, encoding="utf-8")
    monkeypatch.chdir(folder)
    found = {
        "test": "test_it.py::test_step",
        "sizes": [4, 128],
        "recommended": [
            {
                "name": name,
                "cards": 2,
                "peak_bytes": peak,
                "numbers": trials["numbers"][name],  # type: ignore[index]
                "files": {f"{folder}/program.py": text},
            }
        ],
    }
    session = Session("emulate:cuda:a100,devices=2,values=off", [], shows_progress=False)
    assert Proof(session, found, 120.0).is_held()
    of_peak, of_numbers = capsys.readouterr().out.splitlines()
    subject = f"proven: {name}: each of 2 ranks of the copy has the peak"
    assert of_peak == f"{subject} {format_exact(peak)}"
    assert of_numbers.startswith("results: equal, bit for bit (28 losses, gradients and results")


def test_models_that_draw_nothing_are_split(python: Run, tmp_path: Path) -> None:
    """Random numbers of the device are drawn by the model only if it has a layer that does so."""
    noisy = MODEL.replace("x = block(x)", "x = nn.functional.dropout(block(x), 0.1)")
    found = {}
    for name, text in (("plain", MODEL), ("noisy", noisy)):
        numbers = _trials(python, _written(tmp_path / name, text), 1)["numbers"]
        found[name] = numbers["2 micro-batches"]  # type: ignore[index]
    drawn = "changes the results: each part draws random numbers of its own"
    assert found == {"plain": "last digits differ", "noisy": drawn}


def test_one_card_is_not_shared(python: Run, tmp_path: Path) -> None:
    """``fully_shard`` is not offered if the user has one card."""
    found = _trials(python, _written(tmp_path / "as_it_is", MODEL), 1)
    assert not [name for name in found["offered"] if "shard" in name]  # type: ignore[attr-defined]


def test_activations_on_the_host_without_copies(python: Run, tmp_path: Path) -> None:
    """A trial that copies nothing has the peak of the program that does, also with transposed
    activations, whose strides a copy to the host and back keeps.
    """
    found = _trials(
        python, _written(tmp_path / "as_it_is", MODEL), 1, ["save activations on the host"]
    )
    ((peak, text),) = found["found"].values()  # type: ignore[attr-defined]
    ran = python("-c", RUN, _written(tmp_path / "patched", text), forked=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == peak


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao is not installed")
@pytest.mark.parametrize("bits", [8, 4])
def test_optimizer_states_of_few_bits(python: Run, tmp_path: Path, bits: int) -> None:
    """The patched program has the peak of the trial, which is lower than that of the step."""
    name = f"torchao's AdamW{bits}bit"
    found = _trials(python, _written(tmp_path / "as_it_is", MODEL), 1, [name])
    assert found["clean"]
    ((peak, text),) = found["found"].values()  # type: ignore[attr-defined]
    assert peak < found["base"]
    numbers = found["numbers"][name]  # type: ignore[index]
    assert numbers == f"changes the results: optimizer states of {bits} bits"
    ran = python("-c", RUN, _written(tmp_path / "patched", text), forked=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == peak
