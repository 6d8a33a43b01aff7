"""What a program without values saves does not replace what was there."""

import pytest

pytestmark = pytest.mark.emulates

PROGRAM = """
import sys
from pathlib import Path
import emulated_cuda
emulated_cuda.load("t4", values=sys.argv[2] == "on")
import torch
import safetensors.torch

folder = Path(sys.argv[1])
ones = torch.ones(4, device="cuda") * 1
for name in ("old.pt", "new.pt"):
    torch.save({"weights": ones}, folder / name)
    torch.save({"weights": ones, "step": 2}, f=str(folder / name))
    print(name, torch.load(folder / name)["step"])
for name in ("old.safetensors", "new.safetensors"):
    safetensors.torch.save_file({"weights": ones}, folder / name)
    print(name, list(safetensors.torch.load_file(folder / name)))
torch.save(ones, "/dev/null")
print(sorted(path.name for path in folder.iterdir()))
"""
OLD = b"weights of a week"


@pytest.mark.parametrize("values", ["on", "off"])
def test_only_files_of_the_program_itself_are_replaced_without_values(python, tmp_path, values):
    """What it saves stands beside a file that was there, and it reads its own."""
    pytest.importorskip("safetensors")
    for name in ("old.pt", "old.safetensors"):
        (tmp_path / name).write_bytes(OLD)
    run = python("-c", PROGRAM, str(tmp_path), values, forked=True)
    *loaded, listed = run.stdout.splitlines() or [run.stderr]
    assert loaded == [
        "old.pt 2",
        "new.pt 2",
        "old.safetensors ['weights']",
        "new.safetensors ['weights']",
    ], run.stderr
    names = ["new.pt", "new.safetensors", "old.pt", "old.safetensors"]
    kept = ["old.pt", "old.safetensors"] if values == "off" else []
    assert listed == str(sorted([*names, *(f"{name}.no-values" for name in kept)]))
    is_old = [(tmp_path / name).read_bytes() == OLD for name in ("old.pt", "old.safetensors")]
    assert is_old == [values == "off"] * 2
    assert [
        line.split()[1] for line in run.stderr.splitlines() if "is not overwritten" in line
    ] == [str(tmp_path / name) for name in kept]
