"""``repair train.py --batch 64``: scripts, which are run as often as a test."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pytest_cka_memory.cli.main import OK, REGRESSION, main
from pytest_cka_memory.repair import smaller
from pytest_cka_memory.repair.programs import Script, is_script, split_script

SCRIPT = """
import argparse
import sys

import torch
from torch import nn

WIDTH = 64
runs = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x):
        return self.layers(x)


def evaluate(model, batch):
    losses = []
    for _ in range(8):
        losses.append(model(torch.ones(batch, WIDTH)).square().mean())
    return sum(losses)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int)
    args = parser.parse_args()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(args.batch, WIDTH)).sum().backward()
    optimizer.step()
    evaluate(model, args.batch)
    return model


if __name__ == "__main__":
    model = main()
    runs.append((Net, len(sys.argv), __name__))
    open("runs.txt", "a").write(f"{id(Net)} {sys.argv[1:]} {len(runs)}\\n")
    sys.exit()
"""

WITH_DATA = """
import numpy
import torch
from torch.utils.data import DataLoader

model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
rows = torch.from_numpy(numpy.load("data/rows.npy"))
for batch in DataLoader(rows, 32):
    model(batch).square().mean().backward()
    model.zero_grad()
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a script in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path / "train.py"


def test_runs_of_a_script_have_the_same_classes_and_nothing_else_in_common(train: Path) -> None:
    """Its classes are made once, because changes are made to them; everything else is new."""
    before = (sys.modules["__main__"], sys.argv, sys.path[:])
    script = Script("train.py", ["--batch", "8"])
    script()
    script()
    first, second = Path("runs.txt").read_text("utf-8").splitlines()
    assert first == second
    assert first.endswith("['--batch', '8'] 1")
    assert (sys.modules["__main__"], sys.argv, sys.path) == before


def test_script_that_fails(train: Path) -> None:
    """An exit status that is not 0 is an error."""
    train.write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        Script("train.py")()


def test_error_of_a_script_has_the_frames_of_its_own_files(
    train: Path, capfd: pytest.CaptureFixture[str], forked_children: None
) -> None:
    """Those of torch and of the plugin, which runs the script, are left out."""
    train.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.glu(x.view(3))\n"
        "Net()(torch.ones(4))\n",
        encoding="utf-8",
    )
    assert main(["repair", "--device", "cpu", "train.py"]) == REGRESSION
    out, _ = capfd.readouterr()
    assert out == (
        "train.py: RuntimeError: shape '[3]' is invalid for input of size 4 (at train.py:4 in "
        "forward, from train.py:5)\n"
    )


def test_file_that_a_training_has_saved_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without values would save zeros; the script itself can load what it has saved."""
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": torch.ones(2)}, "model.pt")
    Path("train.py").write_text(
        "import torch\n"
        "torch.save({'weights': torch.zeros(2)}, 'model.pt')\n"
        "assert torch.load('model.pt')['weights'].sum() == 0\n"
        "torch.save({}, 'runs/new.pt')\n",
        encoding="utf-8",
    )
    Script("train.py")()
    assert torch.load("model.pt")["weights"].tolist() == [1, 1]
    assert not Path("runs").exists()


@pytest.mark.slow
def test_copy_of_a_script_finds_its_data_and_proves_the_numbers_with_fewer_rows(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    forked_children: None,
) -> None:
    """Data files are linked into the copy, and the batches of a ``DataLoader`` are cut."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    np.save("data/rows.npy", np.ones((64, 32), dtype=np.float32))
    Path("train.py").write_text(WITH_DATA, encoding="utf-8")
    monkeypatch.setattr(smaller, "_available_bytes", lambda: 1.0)  # so that sizes are smaller
    status = main(["repair", "--device", "cpu", "--prove", "--seconds", "6", "train.py"])
    out, progress = capfd.readouterr()
    assert status == OK, progress
    assert "not proven" not in out
    assert "the patched copy has the peak" in out
    assert "with batches of 4 instead of 32)" in out
    assert "results not compared" not in out


def test_what_follows_a_script_belongs_to_it(train: Path) -> None:
    """Options of the script are not those of the command; files with tests are tests."""
    given = ["repair", "--card", "t4", "train.py", "--device", "cuda"]
    assert split_script(given) == (given[:3], given[3:])
    train.with_name("test_it.py").write_text("def test_it(): pass\n", encoding="utf-8")
    train.with_name("checks.py").write_text("def test_it(): pass\n", encoding="utf-8")
    example = "def test(model): pass\n\nif __name__ == '__main__':\n    test(None)\n"
    train.with_name("mnist.py").write_text(example, encoding="utf-8")
    names = ("train.py", "test_it.py", "checks.py", "mnist.py", "missing.py", "test_it.py::test_it")
    assert [name for name in names if is_script(name)] == ["train.py", "mnist.py"]


@pytest.mark.slow
def test_evaluation_of_a_script_is_repaired_and_proven(
    train: Path, capfd: pytest.CaptureFixture[str], forked_children: None
) -> None:
    """Only the call of the evaluation needs no graph; the patch is against the script."""
    options = ["--device", "cpu", "--prove", "--seconds", "6"]
    status = main(["repair", *options, "train.py", "--batch", "512"])
    out, progress = capfd.readouterr()
    assert status == OK, progress
    assert out.startswith("train.py --batch 512: what lowers the peak, measured on cpu")
    assert "no_grad for Net in evaluate: peak" in out
    assert "  +        with torch.no_grad():" in out
    assert "  -        losses.append(model(torch.ones(batch, WIDTH)).square().mean())" in out
    assert "proven: no_grad for Net in evaluate: the patched copy has the peak" in out
    assert "results: equal, bit for bit" in out
    assert "not proven" not in out
