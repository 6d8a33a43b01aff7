"""What lowers the peaks of public programs: the best change and combination, proven.

    python benchmarks/repairs.py --json repairs.json [--only NAME] [--seconds 400]

Each program of ``repairs_programs`` runs on an emulated H100 without values. What is recommended is
written to a copy; the copy runs in a process of its own, and its peak is compared with the
prediction. Then the program and the copies run on the CPU with smaller sizes and values, and the
first loss and all gradients are compared. A program whose library is not installed is left out.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from conditions import conditions

HERE = Path(__file__).resolve()
PROGRAMS = HERE.with_name("repairs_programs")
LIBRARIES = (
    *("torch", "transformers", "diffusers", "timm", "peft", "monai", "lightning", "accelerate"),
    *("x-transformers", "torch-geometric", "torchvision"),
)
PUBLISHED_GIB = {
    "as it is": 26.664,
    "checkpoint every 4th LTXVideoTransformerBlock": 22.188,
    "checkpoint every 2nd LTXVideoTransformerBlock": 17.658,
    "checkpoint every LTXVideoTransformerBlock": 9.316,
}
"""The peak of the reserve on a card, by huggingface/diffusers#10611 (January 2025)."""
NO_LIBRARY = "No module named"


def loaded(path: Path) -> ModuleType:
    """Import a file under the name of its program, which patches do not change."""
    if str(PROGRAMS) not in sys.path:
        sys.path.insert(0, str(PROGRAMS))  # for what the programs have in common
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def search(path: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Search for what lowers a program's peak; write a copy for each recommendation."""
    import torch

    from pytest_cka_memory import MemoryProbe
    from pytest_cka_memory.repair import patched

    program = loaded(path)
    began = time.process_time()

    def run() -> None:
        torch.manual_seed(0)
        program.step("cuda", **program.SIZES)

    report = MemoryProbe("cuda").repairs(run, seconds=seconds)
    (folder / "report.txt").write_text(str(report), encoding="utf-8")
    singles = [trial for trial in report.recommended if len(trial.changes) == 1]
    found = []
    for number, trial in enumerate(report.recommended):
        texts = patched(trial.edits) if trial.edits else {}
        if list(texts) == [str(path)]:
            (folder / f"copy_{number}.py").write_text(texts[str(path)], encoding="utf-8")
        found.append(
            {
                "change": trial.name,
                "single": trial in singles,
                "numbers": trial.numbers,
                "peak_bytes": trial.peak_bytes,
                "flops": trial.flops,
                "lines": trial.lines,
            }
        )
    base = report.repairs.as_it_is
    return {
        "peak_bytes": base.peak_bytes,
        "flops": base.flops,
        "trials": len(report.repairs.trials),
        "complete": report.repairs.is_complete,
        "refused": {each.name: each.because for each in report.repairs.refusals},
        "search_seconds": round(time.process_time() - began, 1),
        "recommended": found,
    }


def peak(path: Path) -> dict[str, Any]:
    """Return the peak of a program on the emulated card."""
    import torch

    from pytest_cka_memory import MemoryProbe

    program = loaded(path)
    probe, peaks = MemoryProbe("cuda"), []
    for _ in range(2):  # a first run may need more
        torch.manual_seed(0)
        peaks.append(probe.run(partial(program.step, "cuda", **program.SIZES)).peak_bytes)
    return {"peak_bytes": peaks[-1]}


def values(paths: list[Path]) -> list[dict[str, Any]]:
    """Compare losses and gradients of a program and of its copies, with values and small sizes."""
    import torch

    from pytest_cka_memory.repair.proof import difference, values_kept

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        for number, path in enumerate(paths):
            program = loaded(path)
            torch.manual_seed(0)
            with values_kept(f"{made}/{number}"):
                program.step("cpu", **program.SMALL)
            if number:
                try:
                    found = difference(f"{made}/0", f"{made}/{number}")
                except ValueError as error:
                    results.append({"error": str(error)})
                    continue
                results.append({"equal": found.is_equal, "largest": found.largest})
                results[-1]["compared"] = found.compared
    return results


def emulated(path: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Search, and measure each copy: each in a process of its own, forked after the imports."""
    import torch._dynamo  # noqa: F401 - checkpoints import it, which takes a second

    import pytest_cka_memory.measure.repeated_runs
    import pytest_cka_memory.repair.report  # noqa: F401

    loaded(path)
    found = _forked(lambda: search(path, folder, seconds))
    for number, each in enumerate(found.get("recommended", ())):
        copy = folder / f"copy_{number}.py"
        if copy.exists():
            each["copy"] = _forked(lambda copy=copy: peak(copy))
    return found


def _forked(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        result = Path(made, "result.json")
        child = os.fork()
        if not child:
            try:
                found = function()
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            result.write_text(json.dumps(found), encoding="utf-8")
            os._exit(0)
        os.waitpid(child, 0)
        if not result.exists():
            return {"error": "the process ended without a result"}
        known: dict[str, Any] = json.loads(result.read_text("utf-8"))
        return known


def published() -> dict[str, Any]:
    """Return what the search finds for LTX-Video's transformer, beside the published reserve.

    The text of the pull request names the model, its sizes and bfloat16; 128 tokens of text, the
    sum as the loss, and gradients that stay are assumed.
    """
    import torch
    from diffusers import LTXVideoTransformer3DModel

    from pytest_cka_memory import MemoryProbe

    torch.nn.functional.rms_norm = _rms_norm  # type: ignore[assignment]
    frames, height, width = 11, 16, 24

    def run() -> None:
        with torch.device("meta"):
            model = LTXVideoTransformer3DModel().to(torch.bfloat16)
        model.to_empty(device="cuda")
        given = {
            "hidden_states": torch.empty(1, frames * height * width, 128, device="cuda"),
            "encoder_hidden_states": torch.empty(1, 128, 4096, device="cuda"),
        }
        given = {name: tensor.to(torch.bfloat16) for name, tensor in given.items()}
        for _ in range(2):
            loss = model(
                **given,
                timestep=torch.zeros(1, dtype=torch.int64, device="cuda"),
                encoder_attention_mask=torch.ones(1, 128, dtype=torch.bool, device="cuda"),
                num_frames=frames,
                height=height,
                width=width,
                return_dict=False,
            )[0].sum()
            loss.backward()

    report = MemoryProbe("cuda").repairs(run, seconds=20)
    trials = [report.repairs.as_it_is, *report.repairs.ran]
    peaks = {trial.name: trial for trial in trials if trial.name in PUBLISHED_GIB}
    return {
        name: {
            "published_gib": known,
            "reserved_gib": round((peaks[name].figures.reserved_bytes or 0) / 2**30, 3),
            "peak_gib": round(peaks[name].peak_bytes / 2**30, 3),
        }
        for name, known in PUBLISHED_GIB.items()
        if name in peaks and peaks[name].figures is not None
    }


def _rms_norm(given: Any, _shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Compute it by the operators of torch before 2.8, which keep more than its kernel."""
    wide = given.float()
    result = wide * (wide.pow(2).mean(-1, keepdim=True) + (eps or 1e-6)).rsqrt()
    return (result if weight is None else result * weight).type_as(given)


def in_process(arguments: list[str], *, emulated: bool) -> Any:
    """Run this file with arguments in a process of its own; return what it found, or an error."""
    with tempfile.TemporaryDirectory() as made:
        result = Path(made, "result.json")
        card = "a100" if "--published" in arguments else "h100"
        start = ["-m", "emulated_cuda", "--card", card, "--no-values"] if emulated else []
        environment = dict(os.environ)
        if "--published" in arguments:  # torch before 2.7 had a workspace of cuBLASLt of its own
            environment |= {
                "TORCH_CUBLAS_WORKSPACE_CACHE": "1",
                "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0",
            }
        command = [sys.executable, *start, str(HERE), "--result", str(result), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if not result.exists():
            return {"error": done.stderr.strip().splitlines()[-1] if done.stderr else "no result"}
        return json.loads(result.read_text("utf-8"))


def one(path: Path, seconds: float, reports: Path | None) -> dict[str, Any]:
    """Search, and prove what is recommended."""
    with tempfile.TemporaryDirectory(prefix="repairs-") as made:
        folder = Path(made)
        given = ["--emulated", str(path), str(folder), "--seconds", str(seconds)]
        found: dict[str, Any] = in_process(given, emulated=True)
        if "error" in found:
            return found
        if reports is not None:
            reports.mkdir(parents=True, exist_ok=True)
            text = (folder / "report.txt").read_text("utf-8")
            (reports / f"{path.stem}.txt").write_text(text, encoding="utf-8")
        numbers = range(len(found["recommended"]))
        every = {number: folder / f"copy_{number}.py" for number in numbers}
        copies = {number: copy for number, copy in every.items() if copy.exists()}
        if copies:
            paths = [str(path), *map(str, copies.values())]
            results = in_process(["--values", *paths], emulated=False)
            for number, each in enumerate(copies):
                known = results if isinstance(results, dict) else results[number]
                found["recommended"][each]["values"] = known
    return found


def summary(programs: dict[str, Any]) -> dict[str, Any]:
    """Return what the rows have in common."""
    rows = [row for row in programs.values() if "error" not in row]
    every = [each for row in rows for each in row["recommended"]]
    copies = [each for each in every if "peak_bytes" in each.get("copy", {})]
    savings = []
    for row in rows:
        exact = [e for e in row["recommended"] if "change" not in e["numbers"]]
        lowest = min((each["peak_bytes"] for each in exact), default=row["peak_bytes"])
        savings.append(100 * (1 - lowest / row["peak_bytes"]))
    return {
        "programs": len(rows),
        "copies": len(copies),
        "copies_with_the_predicted_peak": sum(
            each["copy"]["peak_bytes"] == each["peak_bytes"] for each in copies
        ),
        "median_saving_percent": round(median(savings), 1) if savings else None,
    }


def main() -> None:
    """Run every program, one after the other, and write what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="keep each report as text")
    parser.add_argument("--seconds", type=float, default=400.0, help="processor time of a search")
    parser.add_argument(
        "--published", action="store_true", help="only the published reserve of diffusers#10611"
    )
    for hidden in ("--emulated", "--values", "--result"):
        parser.add_argument(hidden, nargs="+", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result:
        if args.published:
            found: Any = published()
        else:
            work = args.emulated
            found = emulated(*work, args.seconds) if work else values(args.values)
        args.result[0].write_text(json.dumps(found), encoding="utf-8")
        return
    result: dict[str, Any] = {"programs": {}}
    if args.json is not None and args.json.exists():
        result = json.loads(args.json.read_text("utf-8"))
    if args.published:
        result["published"] = in_process(["--published"], emulated=True)
        print(json.dumps(result["published"]), flush=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return
    for path in sorted(PROGRAMS.glob("[!_]*.py")):
        if args.only and path.stem not in args.only:
            continue
        row = one(path, args.seconds, args.reports)
        if re.search(NO_LIBRARY, row.get("error", "")):
            continue
        result["programs"][path.stem] = row
        result |= {"summary": summary(result["programs"]), "conditions": conditions(LIBRARIES)}
        print(path.stem, json.dumps(row)[:600], flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
