"""A reserve that grows although what is in use does not, on several versions of torch.

``python benchmarks/reserve_growth.py PYTHON...`` runs the program of pytorch/pytorch#123548 and
#193400 on an emulated card of 16,304 MB with each interpreter, and prints the reserve after every
20 cycles. On a Radeon RX 9070 XT its author saw 220, 2,980, 5,760, 8,520, 11,300 and 14,060 MB with
torch 2.12.0, 16,000 MB at most and the first retry in cycle 115; with torch 2.9.1 no such growth.

With ``--fitted`` blocks have 34.125 MB, and the card has 208 MB more. Both are not known of the
reported program: the figures need 0.475 to 0.58 MB more per cycle in what is freed, and a highest
reserve of 16,000 MB needs that much for the program.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = "max_split_size_mb:128,expandable_segments:True"
PROGRAM = """
import os
import torch

MB = 2**20
block = int(os.environ["BLOCK_BYTES"])
first = torch.full((64 * MB,), 7, dtype=torch.uint8, device="cuda")
fences, reserved, retried = [], [], None
for cycle in range(121):
    blocks = [torch.empty(block, dtype=torch.uint8, device="cuda") for _ in range(4)]
    fences.append(torch.empty(2 * MB, dtype=torch.uint8, device="cuda"))  # stays behind them
    del blocks
    if cycle % 20 == 0 and cycle < 120:
        reserved.append(f"{torch.cuda.memory_reserved() // MB:,}")
    if retried is None and torch.cuda.memory_stats()["num_alloc_retries"]:
        retried = cycle
highest = torch.cuda.max_memory_reserved() // MB
print(f"| {torch.__version__} | {', '.join(reserved)} | {highest:,} | {retried} |")
"""


def row(python: str, program: Path, *, fitted: bool) -> str:
    """Return the row of one interpreter.

    Raises:
        RuntimeError: if the program ended with an error.
    """
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": SETTINGS, "PYTHONPATH": str(ROOT)}
    environment["BLOCK_BYTES"] = str((34 * 2**20) + (2**17 if fitted else 0))
    memory = "16512MB" if fitted else "16304MB"
    card = ("--card", "h100", "--memory", memory, "--no-values")
    command = [python, "-m", "emulated_cuda", *card, str(program)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{python}: {run.stderr}")
    return run.stdout.strip()


def main() -> None:
    """Print a table with one row for each interpreter."""
    print("| torch | reserve after cycles 0, 20, … 100, MB | highest | first retry in cycle |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "reserve_growth.py"
        program.write_text(PROGRAM, encoding="utf-8")
        fitted = "--fitted" in sys.argv
        for python in [it for it in sys.argv[1:] if it != "--fitted"] or [sys.executable]:
            print(row(python, program, fitted=fitted), flush=True)


if __name__ == "__main__":
    main()
