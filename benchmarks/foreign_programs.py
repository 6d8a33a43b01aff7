"""Run programs and tests of other projects, unchanged, on an emulated H100; say how each ended.

python benchmarks/foreign_programs.py FOLDER [--only NAME ...] [--json FILE]

FOLDER has a checkout of each project under the name in ``PROGRAMS``, and what they import can be
imported. Nothing is downloaded: networks have random weights. With ``--json`` the rows of programs
that did not run now stay as they are. ``foreign_reasons.py`` says why tests fail.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from conditions import conditions
from foreign_reasons import STREAMS, reason_of

OWN = Path(__file__).parents[1]
HELPERS = OWN / "benchmarks" / "foreign"
TESTS = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:cka_memory", "-q", "--tb=short")
TESTS += ("--disable-warnings", "-p", "sampling")  # not "-W ignore": some tests count warnings
_LONGEST = 300
"""Characters that are kept of an error."""


@dataclass(frozen=True)
class Program:
    """What is asked of a project.

    Attributes:
        name: of the row.
        folder: of the project; what it runs in is below it.
        asked: what is run, in words.
        arguments: after ``python -m emulated_cuda --card h100``; ``{own}`` is the folder of this
            repository's small programs, ``{all}`` that of the projects.
        tests: what pytest gets, if it runs tests.
        below: the folder in which it runs.
        seconds: after which it is stopped.
        each: seconds for each test.
        sample: how many tests, drawn by chance.
        words: of which a test's name has one.
        environment: more variables.
        distribution: the installed one that is run, if it is not the checkout.
        apart: whether tests that fail run again in processes of their own.
    """

    name: str
    folder: str
    asked: str
    arguments: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    below: str = "."
    seconds: int = 300
    each: int = 60
    sample: int | None = None
    words: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    apart: bool = False
    distribution: str = ""


def _torchtitan(name: str, asked: str, *arguments: str, seconds: int) -> Program:
    run = "-m torch.distributed.run --nproc_per_node=8 --rdzv_backend c10d"
    run += " --rdzv_endpoint=localhost:0 --local-ranks-filter 0 --role rank --tee 3"
    return Program(
        name,
        "torchtitan",
        asked,
        ("--devices", "8", "--no-values", *shlex.split(run), "-m", "torchtitan.train", *arguments),
        seconds=seconds,
    )


def _pytorch(name: str, seed: int | None = None) -> Program:
    second = "" if seed is None else ", another sample"
    own = {} if seed is None else {"FOREIGN_SEED": str(seed)}
    return Program(
        f"PyTorch, {name}{second}",
        "pytorch",
        f"`{name}`, 200 {'of its' if seed is None else 'others of its'} tests for CUDA",
        tests=(
            *("-p", "torch_names", "--noconftest", "-c", os.devnull, "--rootdir", "."),
            *("-n", "1", "--max-worker-restart=40", name),
        ),
        below="test",
        seconds=500,
        sample=200,
        words="cuda autocast",
        environment={"PYTORCH_DISABLE_FP32_PRECISION_LEAK_CHECK": "1", **own},
        apart=True,
    )


PROGRAMS = (
    _torchtitan(
        "torchtitan, debug model",
        "its trainer with `llama3_debugmodel`, 8 cards, `--no-values`, 3 steps",
        *shlex.split("--module llama3 --config llama3_debugmodel --training.steps 3"),
        seconds=420,
    ),
    _torchtitan(
        "torchtitan, 8B",
        "its trainer with `llama3_8b`, 8 cards, `--no-values`, 3 steps",
        *shlex.split("--module llama3 --config llama3_8b --training.steps 3"),
        *("--hf_assets_path", "./tests/assets/tokenizer"),
        seconds=1200,
    ),
    Program(
        "diffusers",
        "diffusers",
        "tests of its pipelines DDIM and DiT, with their tiny networks",
        tests=("tests/pipelines/ddim", "tests/pipelines/dit"),
        environment={"PYTHONPATH": "src"},
        sample=60,
    ),
    Program(
        "TRL",
        "torchtitan",
        "SFT and DPO as in its README, 4 steps each",
        ("{own}/trl_program.py", "tests/assets/tokenizer/tokenizer.json"),
        distribution="trl",
    ),
    Program(
        "DeepSpeed",
        "DeepSpeed",
        "ZeRO 0 to 3, bfloat16 and float16, two ranks",
        (
            *("--devices", "2", "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node=2", "{own}/deepspeed_program.py"),
        ),
    ),
    Program(
        "nanochat",
        "nanochat",
        "tests of its optimizer, engine and attention",
        tests=("tests/test_optim.py", "tests/test_engine.py", "tests/test_attention_fallback.py"),
        each=270,
    ),
    Program(
        "x-transformers",
        "x-transformers",
        "its training script `train_copy.py`, stopped after three minutes",
        ("train_copy.py",),
        seconds=120,
    ),
    Program(
        "tensordict",
        "tensordict",
        "tests of `test_generic.py` on CUDA",
        tests=("tensordict/test_generic.py",),
        below="test",
        sample=150,
        words="cuda device1",
    ),
    Program(
        "torchrl",
        "rl",
        "tests of `test_distributions.py`",
        tests=("test/test_distributions.py",),
        sample=200,
    ),
    Program(
        "MONAI",
        "MONAI",
        "tests of losses and of the Hausdorff distance",
        tests=(
            *("tests/losses/test_dice_loss.py", "tests/losses/test_ds_loss.py"),
            "tests/metrics/test_hausdorff_distance.py",
        ),
    ),
    Program(
        "e3nn",
        "e3nn",
        "the network of its example `tetris.py`, 5 steps beside the CPU",
        ("{own}/e3nn_program.py",),
    ),
    Program(
        "open_clip, training",
        "open_clip",
        "its trainer with RN50 on its synthetic data",
        (
            *("-m", "open_clip_train.main", "--dataset-type", "synthetic"),
            *shlex.split("--train-num-samples 8 --warmup 1 --batch-size 4 --lr 1e-3 --wd 0.1"),
            *shlex.split("--epochs 1 --workers 1 --model RN50"),
        ),
        environment={"PYTHONPATH": "src"},
    ),
    Program(
        "open_clip, tests",
        "open_clip",
        "tests of losses, metrics, tasks and NaFlex",
        tests=(
            *("tests/test_loss.py", "tests/test_retrieval_metrics.py", "tests/test_naflex.py"),
            *("tests/test_task_specific_unit.py", "tests/test_optim_layer_decay.py"),
        ),
        environment={"PYTHONPATH": "src"},
    ),
    Program(
        "optimum-quanto",
        "optimum-quanto",
        "tests of weights, activations and linear layers on CUDA",
        tests=("tests/tensor/activations", "tests/tensor/weights", "tests/nn/test_qlinear.py"),
        sample=150,
        words="cuda",
    ),
    Program(
        "unsloth",
        "unsloth",
        "its own checks of its norms, and its cross entropy beside PyTorch's",
        ("{own}/unsloth_program.py",),
    ),
    *map(
        _pytorch,
        ("test_cuda.py", "test_nn.py", "test_optim.py", "test_autocast.py", "test_linalg.py"),
    ),
    *(_pytorch(name, 56) for name in ("test_nn.py", "test_optim.py", "test_linalg.py")),
)


def run(program: Program, folder: Path) -> dict[str, Any]:
    """Run a program and return its row."""
    place = folder / program.folder / program.below
    names = {"own": HELPERS, "all": folder}
    with tempfile.TemporaryDirectory() as temporary:
        found, log = Path(temporary) / "found.xml", Path(temporary) / "log.txt"
        figures = Path(temporary) / "figures.json"
        command = [sys.executable, "-m", "emulated_cuda", "--card", "h100", "--json", str(figures)]
        command += [argument.format(**names) for argument in program.arguments]
        if program.tests:
            command += ["-m", "pytest", *TESTS, f"--junitxml={found}", f"--timeout={program.each}"]
            command += [f"--session-timeout={program.seconds}", *program.tests]
        begun = time.monotonic()
        status = _wait(command, place, _environment(program, place), log, program)
        row: dict[str, Any] = {"asked": program.asked}
        if program.distribution:
            row["version"] = metadata.version(program.distribution)
        else:
            row["version"] = version_of(folder / program.folder)
        row["seconds"] = round(time.monotonic() - begun)
        row["ended"] = status is not None
        row["allocated_mb"] = _allocated(figures)
        if not program.tests:
            return {**row, "exit_status": status, "printed": _printed(log)}
        if not found.exists():
            return {**row, "problem": _printed(log)}
        tests = tests_in(found)
        return {**row, **(_again(program, place, tests) if program.apart else tests)}


def _again(program: Program, place: Path, tests: dict[str, Any]) -> dict[str, Any]:
    """Run failed tests in processes of their own, if another state or setting may be the reason.

    Those that failed for no known reason run as before, because others may have left a state. Those
    that expect streams to run at the same time run with late events.
    """
    failures, alone, late = [], [], []
    for failure in tests["failures"]:
        kind, reason = reason_of(**failure)
        if kind == "open" and _passes(program, place, failure["test"]):
            alone.append(failure["test"])
        elif reason == STREAMS and _passes(program, place, failure["test"], "--late-events"):
            late.append(failure["test"])
        else:
            failures.append(failure)
    passed = tests["passed"] + len(alone) + len(late)
    apart = {"passed alone": alone, "passed with late events": late}
    return {**tests, "passed": passed, **apart, "failures": failures}


def _passes(program: Program, place: Path, test: str, *settings: str) -> bool:
    options = program.tests[: program.tests.index("-n")]
    command = [sys.executable, "-m", "emulated_cuda", "--card", "h100", *settings, "-m", "pytest"]
    command += [*TESTS, *options, f"--timeout={program.each}", f"{program.tests[-1]}::{test}"]
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary) / "log.txt"
        return _wait(command, place, _environment(program, place), log, program) == 0


def _environment(program: Program, place: Path) -> dict[str, str]:
    words = {"FOREIGN_WORDS": program.words}
    if program.sample is not None:
        words["FOREIGN_SAMPLE"] = str(program.sample)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline"}
    given = program.environment.get("PYTHONPATH")
    paths = [str(OWN), str(HELPERS), *([str(place / given)] if given else [])]
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    own = {**program.environment, "PYTHONPATH": path}
    return {**os.environ, **offline, **words, "TOKENIZERS_PARALLELISM": "false", **own}


def _wait(
    command: list[str], place: Path, environment: dict[str, str], log: Path, program: Program
) -> int | None:
    """Return the exit status, or None if the program was stopped."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(program.seconds + program.each)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return None


def tests_in(found: Path) -> dict[str, Any]:
    """Return counts of outcomes, and each test that failed with its error."""
    outcomes: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(found).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problem = next((part for part in case if part.tag in ("failure", "error")), None)
        if problem is not None:
            outcomes[name] = "failed", str(problem.get("message"))
        elif name not in outcomes:
            outcomes[name] = ("skipped" if case.find("skipped") is not None else "passed"), ""
    counts = Counter(outcome for outcome, _ in outcomes.values())
    failures = []
    for name, (outcome, why) in outcomes.items():
        if outcome == "failed":
            why = re.sub(r"(/[\w.+-]+)+/(?=[\w.+-]+)", "", " ".join(why.split()))
            why = why.partition(" To execute this test")[0][:_LONGEST]
            failures.append({"test": name, "why": why})
    return {"passed": counts["passed"], "skipped": counts["skipped"], "failures": failures}


def _printed(log: Path) -> list[str]:
    """Return the lines of a program's result, or its last ones."""
    lines = log.read_text("utf-8", errors="replace").replace("\r", "\n").splitlines()
    results = [line for line in lines if "RESULT" in line or "step:" in line or "loss" in line]
    chosen = results[-8:] if results else lines[-8:]
    return [re.sub(r"\x1b\[[\d;]*m", "", line)[:_LONGEST] for line in chosen]


def _allocated(figures: Path) -> float | None:
    """Return the most that a process had allocated, or reserved if it was stopped, in MB."""
    if not figures.exists():
        return None
    rows = json.loads(figures.read_text("utf-8"))
    most = [row["max_allocated_bytes"] or row["max_reserved_bytes"] or 0 for row in rows]
    return round(max(most) / 2**20, 1) if most else None


def version_of(folder: Path) -> str | None:
    """Return the commit of a checkout, if it has one, or what its file ``.version`` says."""
    file = folder / ".version"
    if file.exists():
        return file.read_text("utf-8").strip()
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    names = [program.name for program in PROGRAMS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    options = parser.parse_args()
    for program in PROGRAMS:
        if program.name not in options.only:
            continue
        row = run(program, options.folder.absolute())
        print(program.name, json.dumps(row, indent=1), flush=True)
        if options.json:
            write(options.json, program.name, row)
    return 0


def write(path: Path, name: str, row: dict[str, Any]) -> None:
    """Write the row of a program into a file, in the order of the programs."""
    import torch

    kept = json.loads(path.read_text("utf-8"))["programs"] if path.exists() else {}
    kept[name] = {**row, "date": conditions()["date"]}
    order = [program.name for program in PROGRAMS if program.name in kept]
    data = {"torch": torch.__version__, "card": "h100"}
    data["programs"] = {name: kept[name] for name in order}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
