"""Leaks that libraries had, each at a release that leaks and at one that does not.

No release of snntorch repairs its leak; there the later release runs with the call that frees it.

    python benchmarks/published_leaks.py --json published-leaks.json --folder FOLDER

Each release is installed with ``pip install --target`` into a folder of its own, without what it
requires; that has to be installed beside torch, or in ``FOLDER/requirements``. The code of a case
runs once to fill caches, then in a region on the CPU, in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
MODELS: list[Any] = []
"""The models of a program outlive what it does with them."""


class Case(NamedTuple):
    """A leak, and what uses the library as its report of the leak says."""

    source: str
    leaking: str
    """The release that leaks, as pip takes it."""
    repaired: str
    use: Callable[[bool], Callable[[], object]]
    """Is given whether this is the repaired release; returns the code of the region."""


def kept(model: Any) -> Any:
    """Return a model that this module keeps."""
    MODELS.append(model)
    return model


def convolution() -> Any:
    """Return a small network of images."""
    from torch import nn

    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    return nn.Sequential(*layers)


def tangermeme(repaired: bool) -> Callable[[], object]:
    """Attribute a prediction to its sequence."""
    import torch
    from tangermeme.deep_lift_shap import deep_lift_shap
    from torch import nn

    layers = (nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 18, 1))
    model = kept(nn.Sequential(*layers))
    one_hot = torch.eye(4)[torch.arange(40) % 4].view(2, 20, 4).transpose(1, 2).contiguous()
    return lambda: deep_lift_shap(model, one_hot, device="cpu", n_shuffles=2, random_state=0)


def grad_cam(repaired: bool) -> Callable[[], object]:
    """Make a GradCAM for a model, use it and delete it."""
    import torch
    from pytorch_grad_cam import GradCAM

    model, images = kept(convolution()), torch.ones(2, 3, 16, 16)

    def use() -> None:
        cam = GradCAM(model, [model[0]] if repaired else model[0])
        cam(input_tensor=images)
        model.zero_grad()

    return use


def shapley_cam(repaired: bool) -> Callable[[], object]:
    """Make a ShapleyCAM, use it in its with statement and delete it."""
    import torch
    from pytorch_grad_cam import ShapleyCAM

    model, images = kept(convolution()), torch.ones(2, 3, 16, 16)

    def use() -> None:
        with ShapleyCAM(model=model, target_layers=[model[0]]) as cam:
            cam(input_tensor=images, targets=None)
        model.zero_grad()

    return use


def snntorch(repaired: bool) -> Callable[[], object]:
    """Make a neuron and delete it; no release is repaired, but the list can be cleared."""
    import torch
    from snntorch import Leaky, SpikingNeuron

    def use() -> None:
        Leaky(beta=torch.full((250,), 0.5))
        if repaired:
            SpikingNeuron.init()

    return use


CASES = {
    "tangermeme": Case(
        "jmschrei/tangermeme#84", "tangermeme==1.0.0", "tangermeme==1.6.0", tangermeme
    ),
    "grad-cam": Case(
        "jacobgil/pytorch-grad-cam#132", "grad-cam==1.3.1", "grad-cam==1.3.9", grad_cam
    ),
    "shapley-cam": Case(
        "jacobgil/pytorch-grad-cam#575", "grad-cam==1.5.5", "grad-cam==1.5.7", shapley_cam
    ),
    "snntorch": Case("jeshraghian/snntorch#328", "snntorch==0.9.1", "snntorch==1.0.0", snntorch),
}


def main() -> None:
    """Install and run every case, or, with ``--run``, one case in this process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--run", nargs=2, metavar=("CASE", "WHICH"))
    args = parser.parse_args()
    if args.run:
        print(json.dumps(measured(args.run[0], repaired=args.run[1] == "repaired")))
        return
    rows = []
    for name, case in CASES.items():
        for which, release in (("leaking", case.leaking), ("repaired", case.repaired)):
            found = in_process(args.folder.resolve(), name, which, release)
            rows.append({"case": name, "source": case.source, "release": release, **found})
            print(rows[-1], flush=True)
    args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", "utf-8")


def in_process(folder: Path, name: str, which: str, release: str) -> dict[str, Any]:
    """Install a release if it is not there, and return what a process measures with it."""
    target = folder / release
    if not target.exists():
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*install, str(target), release], check=True)
    path = os.pathsep.join((str(target), str(folder / "requirements")))
    command = [sys.executable, "-W", "ignore", str(HERE), "--run", name, which]
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{release}: {run.stderr}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return {"which": which, **found}


def measured(name: str, *, repaired: bool) -> dict[str, Any]:
    """Return what one use of a library retains, and what the report names as its holder."""
    from pytest_cka_memory import MemoryProbe

    use = CASES[name].use(repaired)
    use()
    with MemoryProbe("cpu").measure() as region:
        use()
    groups = [
        {"bytes": holding.bytes, "held_by": holding.held_by, "what to do": holding.hint}
        for holding in region.retained
    ]
    return {"retained_bytes": region.retained_bytes, "groups": groups}


if __name__ == "__main__":
    main()
