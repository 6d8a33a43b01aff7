"""Compare every operator of torch's own database on the emulated device with the CPU.

``python benchmarks/opinfo.py`` runs up to ten samples of each operator in single precision
and in bfloat16, forward and backward. It prints how many operators give the CPU's values within the
tolerances of the database, and for how many the allocated bytes and the peak are the same with and
without values. Needs ``pip install expecttest scipy``.

The CPU rounds some operators to half precision more than once, and may overflow in eight bits; a
card's kernels do not. If the device differs from the CPU, but not from the same operator in single
precision, rounded once, the operator agrees and is named.

Each process takes one operator after the other; after a crash the next process goes on.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16")
UNINITIALIZED = (
    *("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted"),
    "new_empty_strided",
)


# ---- One process ----


def work(names: list[str] | None, samples: int, out: Path, values: bool, skip: set[str]) -> None:
    """Append one line of JSON to `out` for every operator and type."""
    import emulated_cuda

    emulated_cuda.load("h100", values=values)  # a card with float8
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with out.open("a", encoding="utf-8") as lines:
        for operator in op_db:
            key = f"{operator.name}.{operator.variant_test_name}".rstrip(".")
            if (names and operator.name not in names and key not in names) or key in skip:
                continue
            print(json.dumps({"begin": key}), file=lines, flush=True)
            found = {}
            for dtype in DTYPES:
                supported = operator.supported_dtypes("cpu") & operator.supported_dtypes("cuda")
                if getattr(torch, dtype) in supported:
                    found[dtype] = compare(operator, getattr(torch, dtype), samples, values)
            others = operator.supported_dtypes("cpu") or operator.supported_dtypes("cuda")
            if not found and others:  # integers or complex numbers only, or CUDA only
                dtype = sorted(others, key=str)[-1]
                found[str(dtype)] = compare(operator, dtype, samples, values)
            print(json.dumps({"name": key, "found": found}), file=lines, flush=True)


def compare(operator: Any, dtype: Any, samples: int, values: bool) -> dict[str, Any]:
    """Run one operator on both devices; return differences and bytes."""
    import torch

    from emulated_cuda.loading import loaded

    problems: list[str] = []
    of_the_cpu: list[str] = []
    sizes: list[list[int]] = []
    skipped = 0
    differentiable = operator.supports_autograd and dtype in operator.supported_backward_dtypes(
        "cpu"
    )
    torch.manual_seed(0)
    inputs = []
    with contextlib.suppress(Exception):
        for sample in operator.sample_inputs("cpu", dtype, requires_grad=differentiable):
            inputs.append(sample)
            if len(inputs) == samples:
                break
    for number, sample in enumerate(inputs):
        if values:
            try:
                expected = run(operator, on(sample, operator, "cpu"), "cpu", differentiable)
            except Exception:
                skipped += 1
                continue
        loaded.wait_for_backward_threads()
        gc.collect()  # so that every sample starts without memory of the one before
        torch.cuda.empty_cache()
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        moved = on(sample, operator, "cuda")
        before = torch.cuda.memory_allocated()
        try:
            found = run(operator, moved, "cuda", differentiable)
        except Exception as error:
            problems.append(f"{number}: {type(error).__name__}: {str(error)[:300]}")
            moved = None
            continue
        finally:
            loaded.wait_for_backward_threads()
            peak = torch.cuda.max_memory_allocated() - start
        sizes.append([number, before - start, torch.cuda.memory_allocated() - before, peak])
        if values and not is_uninitialized(operator) and not sample.kwargs.get("dropout_p"):
            try:
                problem = difference(operator, expected, found, dtype)
            except RuntimeError as error:  # a value that was not computed
                problem = f"{type(error).__name__}: {str(error)[:300]}"
            else:
                if problem and is_right(operator, sample, found, dtype, differentiable):
                    of_the_cpu.append(f"{number}: {problem}")
                    problem = ""
            if problem:
                problems.append(f"{number}: {problem}")
        del found, moved
    return {
        "problems": problems,
        "of_the_cpu": of_the_cpu,
        "bytes": sizes,
        "samples": len(inputs) - skipped,
    }


def is_right(
    operator: Any, sample: Any, found: tuple[Any, Any], dtype: Any, differentiable: bool
) -> bool:
    """Return whether what was found is what single precision gives on the CPU, rounded once."""
    import torch

    if operator.name == "torch._scaled_mm" and not sample.kwargs:
        factor, other, *scales = (sample.input, *sample.args)
        product = factor.float() @ other.float() * scales[0] * scales[1]
        largest = torch.finfo(factor.dtype).max  # a card converts to eight bits with saturation
        expected = [product.clamp(-largest, largest).to(factor.dtype)], []
    elif dtype in (torch.bfloat16, torch.float16):
        try:
            expected = run(operator, on(sample, operator, "cpu", wide=True), "cpu", differentiable)
        except Exception:  # it does not take single precision
            return False
    else:
        return False
    return not difference(operator, expected, found, dtype)


def is_uninitialized(operator: Any) -> bool:
    """Whether the operator returns memory that it has not written."""
    return operator.name in UNINITIALIZED


def on(sample: Any, operator: Any, device: str, wide: bool = False) -> Any:
    """Return a sample with its tensors on a device; each is a leaf of the autograd graph.

    Half precision becomes single precision if it is to be `wide`.
    """
    import torch

    def move(value: Any) -> Any:
        if wide and isinstance(value, torch.Tensor) and value.dtype.itemsize == 2:
            is_half = value.is_floating_point()
            single = value.detach().float() if is_half else value
            return single.requires_grad_(value.requires_grad) if is_half else single
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_conj() or value.is_neg():
                return value.detach().to(device).requires_grad_(value.requires_grad)
            whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
            part = whole.to(device).as_strided(value.shape, value.stride(), value.storage_offset())
            return part.detach().requires_grad_(value.requires_grad)
        if isinstance(value, torch.device):
            return torch.device(device)
        return value

    moved = sample.transform(move)
    if operator.name == "tensor_split":  # takes its indices on the CPU only
        moved.args = sample.args
    if "device" in moved.kwargs:
        moved.kwargs = {**moved.kwargs, "device": device}
    return moved


def run(operator: Any, sample: Any, device: str, differentiable: bool) -> tuple[Any, Any]:
    """Return the outputs and the gradients of the inputs."""
    import torch
    from torch.utils import _pytree

    torch.manual_seed(1)
    output = operator.op(sample.input, *sample.args, **sample.kwargs)
    if sample.output_process_fn_grad is not None:
        processed = sample.output_process_fn_grad(output)
    leaves = _pytree.tree_leaves(processed)
    wanted = [
        leaf
        for leaf in _pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf
    ]
    roots = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    gradients: Any = []
    if differentiable and roots and wanted:
        weights = [torch.ones_like(root) for root in roots]
        gradients = torch.autograd.grad(roots, wanted, weights, allow_unused=True)
    return leaves, gradients


def difference(operator: Any, expected: Any, found: Any, dtype: Any) -> str:
    """Return how the results or gradients differ; empty if they are the same."""
    for kind, left, right in zip(("value", "gradient"), expected, found, strict=True):
        if len(left) != len(right):
            return f"{kind}: {len(right)} results for {len(left)}"
        for one, other in zip(left, right, strict=True):
            problem = difference_of_two(one, other, tolerance_of(operator, dtype))
            if problem:
                return f"{kind}: {problem}"
    return ""


def tolerance_of(operator: Any, dtype: Any) -> float:
    import torch

    if dtype == torch.bfloat16:
        return 2e-1 if "attention" in operator.name else 2e-2  # it rounds in other places
    return 1e-4


def difference_of_two(expected: Any, found: Any, tolerance: float) -> str:
    import torch

    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        both_nan = expected != expected and found != found
        return "" if both_nan or expected == found else f"{found!r} for {expected!r}"
    if expected.numel() == 0:  # statistics that the CPU does not return
        return ""
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if found.dtype.itemsize == 1 and found.is_floating_point():
        tolerance = torch.finfo(found.dtype).eps  # one unit in the last place, if sums round apart
        found, expected = found.float(), expected.float()
    try:
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=False
        )
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


# ---- All processes ----


def collect(
    folder: Path, values: bool, samples: int, names: list[str] | None
) -> tuple[dict[str, Any], set[str]]:
    """Return the results of every operator, and the operators in which a process crashed.

    Operators whose results are in `folder` do not run again.
    """
    crashed: set[str] = set()
    out = folder / f"values-{'on' if values else 'off'}.jsonl"
    out.touch()
    while True:
        done = set(results_in(out)) | crashed
        command = [sys.executable, __file__, "--worker", "on" if values else "off"]
        command += ["--lines", str(out), "--samples", str(samples)]
        command += ["--skip", json.dumps(sorted(done)), *(names or [])]
        ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
        begun = [json.loads(line).get("begin") for line in out.read_text().splitlines()]
        last = [name for name in begun if name is not None][-1:]
        if ended.returncode == 0:
            return results_in(out), crashed
        if ended.returncode > 0 or not last or last[0] in done:  # no crash, but an error of ours
            raise SystemExit(f"a process ended with {ended.returncode}: {ended.stderr}")
        crashed.update(last)


def results_in(out: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line["found"] for line in lines if "name" in line}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="operators; all if none is given")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--worker", choices=["on", "off"], help=argparse.SUPPRESS)
    parser.add_argument(
        "--keep", type=Path, help="keep results in this folder, and continue an interrupted run"
    )
    parser.add_argument("--json", type=Path, help="write the summary to this file")
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=json.loads, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        on = options.worker == "on"
        work(options.names, options.samples, options.lines, on, set(options.skip))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(collect, folder, values, options.samples, options.names)
                for values in (True, False)
            ]
            (with_values, crashed), (without, crashed_without) = (one.result() for one in both)
    found = summary(with_values, without, crashed | crashed_without)
    print_summary(found)
    if options.json is not None:
        text = json.dumps({"samples_an_operator": options.samples, **found}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


def summary(
    with_values: dict[str, Any], without: dict[str, Any], crashed: set[str]
) -> dict[str, Any]:
    """Return what was compared, and each operator that differs in values or bytes."""
    different = {
        name: [problem for one in found.values() for problem in one["problems"]]
        for name, found in with_values.items()
    }
    of_the_cpu = {
        name: [problem for one in found.values() for problem in one["of_the_cpu"]]
        for name, found in with_values.items()
        if name not in different or not different[name]
    }
    other_bytes = collections.defaultdict(list)
    compared = 0
    for name, found in with_values.items():
        for dtype, one in found.items():
            others = without.get(name, {}).get(dtype, {"bytes": []})["bytes"]
            known = {sizes[0]: sizes for sizes in others}
            for sizes in one["bytes"]:
                if sizes[0] in known:
                    compared += 1
                    if sizes != known[sizes[0]]:
                        other_bytes[name].append([dtype, *sizes, *known[sizes[0]][1:]])
    return {
        "operators": len(with_values.keys() | crashed),
        "samples": sum(one["samples"] for found in with_values.values() for one in found.values()),
        "crashed": sorted(crashed),
        "different": {name: problems[:1] for name, problems in different.items() if problems},
        "of_the_cpu": {name: problems[:1] for name, problems in of_the_cpu.items() if problems},
        "samples_with_bytes": compared,
        "other_bytes_columns": [
            *("dtype", "sample", "start", "left", "peak"),
            *("start_without_values", "left_without_values", "peak_without_values"),
        ],
        "other_bytes": other_bytes,
    }


def print_summary(found: dict[str, Any]) -> None:
    """Print how many operators agree, and the names of the others."""
    bad = {*found["different"], *found["crashed"]}
    agreeing = found["operators"] - len(bad)
    print(f"{found['operators']} operators, {found['samples']} samples; {agreeing} agree")
    print(f"not alike: {', '.join(sorted(bad))}; crashed: {found['crashed']}")
    rounded = ", ".join(sorted(found["of_the_cpu"])) or "none"
    print(f"like single precision, but unlike the CPU, of those that agree: {rounded}")
    print(f"bytes: {found['samples_with_bytes']} samples compared")
    print(f"other bytes: {', '.join(sorted(found['other_bytes']))}")


if __name__ == "__main__":
    main()
