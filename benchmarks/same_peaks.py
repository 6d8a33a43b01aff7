"""Print whether separate sessions measure the same: five in a row, and one with two workers.

    python benchmarks/same_peaks.py [--sessions 5] [--threads 2]

Five networks are trained for two steps each in tests with ``--cka-memory-report``. Every figure of
every test must be the same in each session for the same number of threads, which every process is
given by ``torch.set_num_threads``.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tabulate import tabulate

TESTS = """
import pytest, torch, torchvision
from torch import nn
torch.set_num_threads({threads})

NETWORKS = {{
    "resnet18": (torchvision.models.resnet18, lambda: torch.ones(4, 3, 64, 64)),
    "mobilenet_v2": (torchvision.models.mobilenet_v2, lambda: torch.ones(4, 3, 64, 64)),
    "vit": (lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 64, 128),
            lambda: torch.ones(4, 3, 32, 32)),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2),
                lambda: torch.ones(16, 4, 64)),
    "lstm": (lambda: nn.LSTM(64, 64, 2), lambda: torch.ones(16, 4, 64)),
}}

@pytest.mark.parametrize("name", NETWORKS)
def test_two_steps(name):
    build, batch = NETWORKS[name]
    network = build()
    optimizer = torch.optim.Adam(network.parameters())
    for _ in range(2):
        output = network(batch())
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def figures_of(folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Return the figures of each test of a session, by the test's name."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    measured = ["--cka-memory-device=cpu", "--cka-memory-report", "--cka-memory-json=report.json"]
    subprocess.run([*command, *measured, *options], cwd=folder, check=True, capture_output=True)
    regions = json.loads((folder / "report.json").read_text("utf-8"))["regions"]
    return {
        region["nodeid"].partition("::")[2]: {
            key: value for key, value in region.items() if key.endswith("_bytes")
        }
        for region in regions
    }


def main() -> None:
    """Run the sessions, print each test's peak, and fail if any figure differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
        (folder / "test_it.py").write_text(TESTS.format(threads=options.threads), "utf-8")
        found = [figures_of(folder, "-p", "no:xdist") for _ in range(options.sessions)]
        found.append(figures_of(folder, "-n", "2"))
    rows = [
        (test, figures["peak_increase_bytes"], figures["retained_bytes"],
         "all equal" if all(other[test] == figures for other in found) else "DIFFERENT")
        for test, figures in found[0].items()
    ]  # fmt: skip
    print(tabulate(rows, headers=("test", "peak increase, bytes", "retained, bytes", "sessions")))
    if any(row[-1] != "all equal" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
