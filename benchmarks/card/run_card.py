"""Run layers, operators and programs on a card, and keep what each asks torch's allocator for.

    python benchmarks/card/run_card.py OUT                      # on this machine's GPU
    python benchmarks/card/run_card.py OUT --emulate h100       # without one
    python benchmarks/card/run_card.py OUT --only programs --jobs 8

Many processes run at a time, which does not change what one of them asks for. OUT gets one file
for each kind; ``compare_card.py`` puts two such folders beside each other.
"""

import argparse
import concurrent.futures
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
KINDS = ("programs", "layers", "operators")
NEED_VALUES = (
    *("sorting", "indexing", "sparse", "optimizers", "losses"),
    *("linear_algebra", "fourier"),  # their libraries plan nothing without a GPU
)
"""Families with sizes that depend on values."""
_PARTS = 3
"""So many processes for torch's database of operators for each job: they take unequal times."""
_MOST_CRASHES = 30


def command(kind: str, emulate: str | None, *, values: bool) -> list[str]:
    """Return how a process of this kind is started, without its arguments."""
    name = {"programs": "card_programs", "operators": "card_operators"}.get(kind, "card_family")
    script = str(HERE / f"{name}.py")
    emulated = ["-m", "emulated_cuda", "--card", str(emulate)]
    emulated += [] if values else ["--no-values"]
    return [sys.executable, "-W", "ignore", *(emulated if emulate else []), script]


def jobs(
    kinds: Sequence[str], emulate: str | None, at_a_time: int
) -> list[tuple[str, list[str], dict[str, str]]]:
    """Return kind, command and environment of each process, the longest first."""
    sys.path.insert(0, str(HERE))
    found: list[tuple[str, list[str], dict[str, str]]] = []
    if "layers" in kinds:
        import card_functions

        for family in card_functions.FAMILIES:
            start = command("layers", emulate, values=family in NEED_VALUES)
            found.append(("layers", [*start, family], {}))
    if "operators" in kinds:
        start = command("operators", emulate, values=True)  # sizes depend on the samples
        parts = _PARTS * at_a_time
        found += [("operators", [*start, f"{part}/{parts}"], {}) for part in range(parts)]
    if "programs" in kinds:
        import card_programs

        for name, environment in card_programs.ENVIRONMENTS.items():
            start = command("programs", emulate, values=name in card_programs.NEED_VALUES)
            found.append(("programs", [*start, name], dict(environment)))
    return found


def search_path() -> str:
    """Return where a process looks for modules: in this repository first."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def run(job: tuple[str, list[str], dict[str, str]], folder: Path, number: int, end: float) -> str:
    """Run a process until its work is done, again after each crash; return a line about it."""
    kind, arguments, environment = job
    lines = folder / f"{kind}-{number}.jsonl"
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path(), **environment}
    begin, crashes, text = time.monotonic(), 0, ""
    while crashes < _MOST_CRASHES and time.monotonic() < end:
        try:
            done = subprocess.run(
                [*arguments, str(lines)],
                env=given,
                timeout=max(1.0, end - time.monotonic()),
                check=False,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired:
            text = "took too long"
            break
        if done.returncode == 0:
            break
        crashes += 1
        text = (done.stderr or done.stdout).strip()[-300:]
        if kind == "programs":
            break
    if kind == "programs" and text:
        with lines.open("a", encoding="utf-8") as file:
            print(json.dumps({"name": arguments[-1], "rows": {"": [{"failed": text}]}}), file=file)
    return (
        f"{kind} {arguments[-1]}: {time.monotonic() - begin:.0f} s, {crashes} crashes {text[-200:]}"
    )


def about(emulate: str | None) -> dict[str, Any]:
    """Return the card and the versions."""
    code = (
        "import json, torch; p = torch.cuda.get_device_properties(0);"
        "print('\\n' + json.dumps({'card': p.name, 'memory': p.total_memory,"
        "'torch': torch.__version__, 'cuda': torch.version.cuda,"
        "'cudnn': torch.backends.cudnn.version()}))"
    )
    start = ["-m", "emulated_cuda", "--card", emulate] if emulate else []
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        given = {**os.environ, "PYTHONPATH": search_path()}
        text = subprocess.check_output(
            [sys.executable, *start, file.name], text=True, env=given, stderr=subprocess.DEVNULL
        )
    found: dict[str, Any] = next(
        json.loads(line) for line in text.splitlines() if line.startswith("{")
    )
    return {**found, "emulated": bool(emulate), "date": time.strftime("%Y-%m-%d")}


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--emulate", metavar="CARD")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=36000, help="then all processes end")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "about.json").write_text(json.dumps(about(options.emulate)), "utf-8")
    end = time.monotonic() + options.seconds
    with (
        tempfile.TemporaryDirectory() as name,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        folder = Path(name)
        works = [
            pool.submit(run, job, folder, number, end)
            for number, job in enumerate(jobs(options.only, options.emulate, options.jobs))
        ]
        for work in concurrent.futures.as_completed(works):
            print(work.result(), flush=True)
        for kind in options.only:
            texts = [file.read_text("utf-8") for file in sorted(folder.glob(f"{kind}-*.jsonl"))]
            with gzip.open(options.out / f"{kind}.jsonl.gz", "wt", encoding="utf-8") as file:
                file.write("".join(texts))


if __name__ == "__main__":
    main()
