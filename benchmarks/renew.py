"""Say which results are older than the code they speak of, and measure them again.

    python benchmarks/renew.py              # each table: its date, and what changed since
    python benchmarks/renew.py soak leaks   # measure these again, and draw the docs' tables
    python benchmarks/renew.py --confirm    # measure a part of each that has one, and compare
    python benchmarks/renew.py --confirm suites -- ARGUMENTS        # more for the script

What a result was measured on stands in ``results/conditions.json``, with the commit. It is as old
as that commit or the one that wrote its file, whichever is newer: a result that was measured again
can be the same. Changes of comments and docstrings do not make it older. A table is measured as a
whole, so that a file never has rows from different machines. To measure all of them takes a day. So
``--confirm`` measures a fixed part of a table, and if all its rows are as they were stored, the
result counts as as new as that commit, with a note of the part. Bytes and outcomes have to be the
same; times, and errors of rounding, which depend on the processor, are confirmed if they differ by
no more than the table's factor. A short table of times is measured again. The rows of versions are
made by ``.ci/against``.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from conditions import ROOT, conditions
from stored_rows import differences

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CONDITIONS = RESULTS / "conditions.json"
COUNTER = ("pytest_cka_memory/meters", "pytest_cka_memory/measure")
DEVICE = ("emulated_cuda",)


class Table(NamedTuple):
    """A table of README or docs, and how it is made."""

    file: str
    """Name of the result's file, with a place for the version of torch."""
    code: tuple[str, ...]
    """Folders of the code that the table speaks of."""
    script: str
    """The file in this folder that makes it, or `PYTEST`."""
    arguments: tuple[str, ...] = ()
    minutes: int = 1
    """About how long it takes on two cores."""
    needs: str = ""
    """What has to be installed beside the extra test."""
    part: tuple[str, ...] | None = None
    """What to add to measure a part in a few minutes; `ALL` if the whole takes no longer, None if
    its rows are times that are measured again as fast."""
    chosen: str = ""
    """What to write after ``--confirm NAME --`` for a part, because a folder has to be named."""
    sums: tuple[str, ...] = ()
    """Keys of the result that a part need not have: sums over all rows, and what is not its rows'.
    """
    within: Mapping[str, float] = {}
    """Keys of times, and of what rounding makes of equal numbers, with the factor by which a part
    may differ; other times are not compared."""

    def command(self, arguments: Sequence[str], file: Path) -> list[str]:
        """Return the command that measures it, with more arguments, and writes `file`."""
        if self.script == PYTEST:
            made = ["-m", PYTEST, f"--rootdir={ROOT}", f"--cka-memory-json={file}"]
        else:
            made = [str(HERE / self.script), "--json", str(file)]
        return [sys.executable, *made, *self.arguments, *arguments]


ALL: tuple[str, ...] = ()
PYTEST = "pytest"
EINOPS = ("layers", "packing")

TABLES = {
    "leaks": Table(
        "leaks-torch-{torch}.json", ("docs/gallery.md", *COUNTER), "leaks.py",
        minutes=10, needs="pytest-memray; Python 3.13.3 for limit_leaked_objects",
        part=("pytest-cka-memory",), sums=("pytest-memray",),
    ),
    "tests and tensors": Table(
        "unit-cost-torch-{torch}.json",
        ("pytest_cka_memory/holders", "pytest_cka_memory/plugin", *COUNTER), "unit_cost.py",
        minutes=6, needs="little else running",
    ),
    "large sessions": Table(
        "many-tests-torch-{torch}.json",
        ("pytest_cka_memory/plugin", "pytest_cka_memory/reports", *COUNTER), "many_tests.py",
        minutes=3, needs="little else running",
    ),
    "replays": Table(
        "replay-settings-torch-{torch}.json",
        ("pytest_cka_memory/snapshots", *DEVICE), "replay_settings.py", minutes=3,
        part=ALL,
    ),
    "repairs": Table(
        "repairs-torch-{torch}.json", ("pytest_cka_memory/repair", *DEVICE), "repairs.py",
        minutes=8, needs="the programs' packages: diffusers, lightning, monai, peft, timm, …",
        part=ALL, sums=("conditions", "published"),
    ),
    "recordings": Table(
        "recordings-torch-{torch}.json",
        ("pytest_cka_memory/snapshots", *DEVICE), "replay_recordings.py",
        minutes=6, needs="a folder of recordings; those of other people are not in this repository",
        part=ALL,
        chosen="FOLDER",
    ),
    "logs": Table(
        "log-size-torch-{torch}.json",
        ("pytest_cka_memory/plugin", "pytest_cka_memory/reports"), "log_size.py",
        part=ALL,
    ),
    "programs on machines": Table(
        "machines-programs-torch-{torch}.json",
        ("pytest_cka_memory/stored", "pytest_cka_memory/core", *COUNTER), "machines.py",
        ("programs",), minutes=11, part=("--threads", "4"),
    ),
    "networks on machines": Table(
        "machines-networks-torch-{torch}.json", COUNTER, "machines.py",
        ("networks", "--every=8"), minutes=9, part=("--every=40",),
    ),
    "explanations": Table(
        "explanation-cost-torch-{torch}.json", ("pytest_cka_memory/holders", *COUNTER),
        "explanation_cost.py", minutes=9, needs="little else running; 3 GB of memory",
        part=("--most", "100000"), sums=("exponent",),
        within={"seconds": 1.5, "resident_mb": 1.1, "most_mb": 1.1},
    ),
    "cross-check": Table(
        "crosscheck-amd-epyc-torch-{torch}.json", COUNTER, "crosscheck.py", minutes=15,
        part=("--networks", "alexnet", "googlenet", "resnext50_32x4d", "vit_b_32"),
    ),
    "cross-check, ledger": Table(
        "ledger-crosscheck-amd-epyc-torch-{torch}.json",
        tuple(f"{COUNTER[0]}/{name}.py" for name in ("storage_meter", "ledger", "objects")),
        "crosscheck.py", minutes=15, needs="CKA_MEMORY_NATIVE=0 in the environment",
        part=("--networks", "alexnet", "googlenet", "resnext50_32x4d", "vit_b_32"),
    ),
    "suites": Table(
        "other-suites-amd-epyc-torch-{torch}.json",
        ("pytest_cka_memory/plugin", *COUNTER), "other_suites.py",
        minutes=15, needs="--repeat N and the suites; caches that an earlier run has filled",
        part=("skorch=--pyargs skorch.tests.test_classifier skorch.tests.test_regressor",),
        sums=("ratio",),
    ),
    "suites' reserve": Table(
        "reserve-suites-torch-{torch}.json",
        ("pytest_cka_memory/measure", *DEVICE), "reserve_suites.py",
        ("--device", "emulate:cuda:a100"),
        minutes=15,
        needs="the suites, and what their tests import; for the part einops 0.8.2, and here its "
        "unpacked source distribution",
        part=(f"einops={' '.join(f'einops-0.8.2/einops/tests/test_{it}.py' for it in EINOPS)}",),
    ),
    "soak": Table(
        "soak-torch-{torch}.json", COUNTER, "soak.py", needs="OMP_NUM_THREADS=1 on a busy machine"
    ),
    "gates": Table(
        "gates-amd-epyc-torch-{torch}.json", ("cka", "tests/gates"), PYTEST,
        (str(ROOT / "tests" / "gates"), "-q"), part=ALL, sums=("session",),
    ),
    "cka by chance": Table(
        "calibration-amd-epyc-1-thread-torch-{torch}.json", ("cka",), "calibration.py",
        ("false-positives",), minutes=20, part=("--pairs", "200"),
    ),
    "cost of resamples": Table(
        "calibration-cost-amd-epyc-1-thread-torch-{torch}.json", ("cka",), "calibration.py",
        ("cost",), minutes=15, needs="one thread; little else running",
        part=("--sizes", "64"), within={"cpu_time_ratio": 1.1},
    ),
    "intervals": Table(
        "confidence-amd-epyc-1-thread-torch-{torch}.json", ("cka",), "confidence.py", minutes=3,
        part=ALL,
    ),
    "measures": Table(
        "measures-errors-torch-{torch}.json", ("cka",), "measures.py", ("errors",), minutes=2,
        part=ALL,
    ),
    "measures by chance": Table(
        "measures-chance-torch-{torch}.json", ("cka",), "measures.py", ("chance",), minutes=5,
        part=ALL,
    ),
    "parts of batches": Table(
        "measures-parts-torch-{torch}.json", ("cka",), "measures.py", ("parts",), minutes=2,
        part=ALL,
    ),
    "sanity check": Table(
        "sanity-torch-{torch}.json", ("cka",), "sanity.py", minutes=20,
        needs="scikit-learn, pillow; the same processor, because networks are trained", part=ALL,
    ),
    "passes": Table(
        "gram-passes-amd-epyc-1-thread-torch-{torch}.json", ("cka",), "gram_passes.py"
    ),
    "libraries": Table(
        "libraries-amd-epyc-1-thread-torch-{torch}.json", ("cka", *COUNTER), "compare.py",
        minutes=20, needs="--peers; one thread; little else running",
        part=("--networks", "resnet18", "--batch-sizes", "64", "--libraries", "ours"),
        within={"cpu_time_ratio": 1.1, "time_ratio": 1.1},
    ),
    "side by side": Table(
        "side-by-side-emulated-a100-torch-{torch}.json", ("cka", *DEVICE), "side_by_side.py",
        ("--device", "emulate:cuda:a100,values=off"), minutes=15, needs="--peers",
        part=("--libraries", "ours", "pytorch-cka 1.1.3"), chosen="--peers FOLDER",
    ),
    "notebook": Table(
        "notebook-emulated-a100-torch-{torch}.json", DEVICE, "side_by_side_published.py",
        minutes=10, needs="--peers",
        part=ALL,
        chosen="--peers FOLDER",
    ),
    "OpInfo": Table(
        "opinfo-emulated-h100-torch-{torch}.json", DEVICE, "opinfo.py",
        minutes=60, needs="expecttest, scipy",
        part=("--samples", "10", "add", "bmm", "cumsum", "einsum", "fft.rfft", "gather",
              "linalg.qr", "nn.functional.conv2d", "nn.functional.layer_norm", "scatter_add",
              "sort", "where"),
        sums=("operators", "samples", "samples_with_bytes"),
    ),
    "emulated suites": Table(
        "emulated-suites-torch-{torch}.json", DEVICE, "emulated_suites.py",
        minutes=120, needs="clones of the projects, and what their tests import",
        part=ALL,
        chosen="FOLDER pytorch-metric-learning",
    ),
    "fine-tuning": Table(
        "finetuning-torch-{torch}.json", DEVICE, "published_finetuning.py", minutes=8, needs="peft",
        part=("--cases", "full, 128, checkpointed", "LoRA, 128", "FSDP1, two ranks, 16"),
    ),
    "real cards": Table(
        "real-cards.json", DEVICE, "real_cards/run.py", minutes=60,
        needs="diffusers, peft, timm, torchao; --interpreter and --sources of others",
        part=("attention_damek", "attention_enzoding", "checkpointing_vyas", "growth_doplxyz",
              "vision_raschka", "workspace_pytorch"),
        chosen="--interpreter PYTHON_WITH_TORCH_2.9.1 PYTHON_WITH_TORCH_2.14.1",
        sums=("first_bytes",),
    ),
    "tracker": Table(
        "fsdp2-tracker-torch-{torch}.json", DEVICE, "fsdp2_tracker.py", minutes=3,
        needs="expecttest", part=ALL,
    ),
    "programs with recordings": Table(
        "recorded-programs.json",
        ("pytest_cka_memory/snapshots", *DEVICE), "real_cards/recorded.py",
        minutes=30, needs="einops, einx, jaxtyping; a folder of the repositories that it names",
        part=ALL,
        chosen="FOLDER wedsonlin",
    ),
    "accelerate": Table(
        "accelerate-peaks-torch-{torch}.json", DEVICE, "accelerate_peaks.py",
        needs="accelerate, transformers, datasets",
        part=ALL,
    ),
    "laws": Table(
        "laws-torch-{torch}.json", ("pytest_cka_memory/laws", *COUNTER), "laws.py", minutes=2,
        part=ALL,
    ),
    "losses": Table(
        "ranks-losses-torch-{torch}.json", DEVICE, "ranks_losses.py", minutes=3,
        part=ALL, within={"off": 2},
    ),
    "what goes wrong": Table(
        "ranks-hostile-torch-{torch}.json", DEVICE, "ranks_hostile.py", minutes=6,
        part=("--cases", "another size", "another collective", "one rank is out of memory",
              "SIGSEGV", "a group after it was destroyed", "a tensor on the CPU"),
    ),
    "compiled functions": Table(
        "compiled-functions-torch-{torch}.json", DEVICE, "compiled_functions.py", minutes=15,
        part=("--names", "pointwise", "softmax", "sort", "cross entropy", "in a CUDA graph"),
        within={"difference": 2},
    ),
    "compiled code that goes wrong": Table(
        "compiled-hostile-torch-{torch}.json", DEVICE, "compiled_hostile.py", minutes=10,
        part=("--cases", "a store far outside", "a load far outside", "a tensor on the CPU"),
    ),
    "launches": Table("compiled-cost-torch-{torch}.json", DEVICE, "compiled_cost.py", minutes=2),
    "suites of Triton": Table(
        "triton-suites-torch-{torch}.json", DEVICE, "triton_suites.py",
        minutes=60, needs="checkouts of the suites, and what they import",
        part=ALL,
        chosen="FOLDER --suites kernels, or FOLDER --suites pytorch --count 40",
    ),
    "foreign programs": Table(
        "foreign-programs-torch-{torch}.json", DEVICE, "foreign_programs.py",
        minutes=60, needs="checkouts of the projects, and what they import",
        part=ALL,
        chosen="FOLDER --only e3nn nanochat",
    ),
    "Inductor's operators": Table(
        "inductor-operators-torch-{torch}.json", DEVICE, "inductor_operators.py",
        minutes=60, needs="expecttest, scipy",
        part=("any", "dot", "linalg.norm", "nansum", "nn.functional.relu", "select_scatter",
              "take"),
    ),
    "published leaks": Table(
        "published-leaks-torch-{torch}.json", ("pytest_cka_memory/holders", *COUNTER),
        "published_leaks.py", minutes=2,
        needs="--folder FOLDER, and what the libraries require; see the script",
        part=ALL,
        chosen="--folder FOLDER",
    ),
    "reported leaks": Table(
        "reported-leaks-torch-{torch}.json",
        ("pytest_cka_memory/holders", "benchmarks/reported_programs.py", *COUNTER),
        "reported_leaks.py", needs="torchmetrics",
        part=ALL,
    ),
    "holders": Table(
        "holders-torch-{torch}.json", ("pytest_cka_memory/holders", "tests/holders"),
        "holders_table.py", minutes=2, needs="safetensors",
        part=ALL,
    ),
    "PyTorch's tests": Table(
        "torch-distributed-torch-{torch}.json", DEVICE, "torch_distributed.py",
        minutes=10, needs="expecttest",
        part=("--tests", "test_all_reduce*", "test_broadcast*", "test_ddp_*buffer*"),
    ),
    "PyTorch's test files": Table(
        "torch-distributed-files-torch-{torch}.json", DEVICE, "torch_distributed_files.py",
        minutes=60, needs="test/distributed of a checkout of PyTorch, expecttest",
        part=ALL,
        chosen="FOLDER tensor/parallel/test_tp_random_state.py",
    ),
}  # fmt: skip


def commits_since(
    file: Path, code: Sequence[str], root: Path = ROOT, measured: object = None
) -> list[str] | None:
    """Return the commits that changed the code after a result was measured, newest first.

    None if its file is in no commit. If they changed nothing but comments, docstrings and the
    layout of Python files, all in all, none count: such a change moves no figure.

    Args:
        file: the result.
        code: files and folders that it speaks of.
        root: the checkout.
        measured: the commit at which it was measured. It counts if the file is older.
    """
    written = _git(root, "log", "-1", "--format=%H", "--", str(file))
    if not written:
        return None
    newer = isinstance(measured, str) and _is_between(root, written[0], measured)
    start = measured if newer else written[0]
    commits = _git(root, "log", "--format=%h %s", f"{start}..HEAD", "--", *code)
    return commits if commits and not _is_same_code(root, start, code) else []


def _is_same_code(root: Path, start: str, code: Sequence[str]) -> bool:
    """Return whether what Python runs of the code is the same in a commit and in HEAD."""
    changed = _git(root, "diff", "--name-status", "--no-renames", start, "HEAD", "--", *code)
    pairs = [line.split("\t") for line in changed]
    if any(status != "M" or not name.endswith(".py") for status, name in pairs):
        return False
    return all(_program(root, start, name) == _program(root, "HEAD", name) for _, name in pairs)


def _program(root: Path, commit: str, name: str) -> str:
    """Return a file's syntax tree without its docstrings, as text."""
    tree = ast.parse("\n".join(_git(root, "show", f"{commit}:{name}")))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                del node.body[0]
    return ast.dump(tree)


def _is_between(root: Path, older: str, commit: str) -> bool:
    """Return whether a commit is a descendant of an older one, and in the history of HEAD."""
    test = ["git", "-C", str(root), "merge-base", "--is-ancestor"]
    pairs = ((older, commit), (commit, "HEAD"))
    return all(
        subprocess.run([*test, *pair], capture_output=True, check=False).returncode == 0
        for pair in pairs
    )


def _git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def show() -> None:
    """Print the state of every table."""
    known = json.loads(CONDITIONS.read_text("utf-8"))
    for name, table in TABLES.items():
        for file in sorted(RESULTS.glob(table.file.format(torch="*"))):
            given = known.get(file.name, {})
            changed = commits_since(file, table.code, measured=given.get("commit"))
            measured = ", ".join(str(given[key]) for key in ("date", "processor") if key in given)
            confirmed = given.get("confirmed")
            if changed and confirmed:
                changed = commits_since(file, table.code, measured=confirmed["commit"])
                measured += f"; {confirmed['part']} the same on {confirmed['date']}"
            age = "not committed" if changed is None else _counted(len(changed))
            print(f"{name} ({file.name}): {measured or 'conditions unknown'}; {age}")


def _counted(commits: int) -> str:
    if not commits:
        return "as new as its code"
    return f"older than {commits} commit{'s' * (commits != 1)} to its code"


def renew(names: Sequence[str], more: Sequence[str]) -> None:
    """Measure tables again, note the conditions, and draw the tables of the docs."""
    for name in names:
        table = TABLES[name]
        given = conditions(("torch", "pytest"))
        file = RESULTS / table.file.format(torch=str(given["torch"]).partition("+")[0])
        print(
            f"{name}: about {table.minutes} minutes; needs {table.needs or 'nothing'}", flush=True
        )
        before = _written(file)
        ended = subprocess.run(table.command(more, file), check=False)
        if _written(file) == before:  # a script exits with 1 after a result that is not as expected
            sys.exit(f"{name}: {table.script} exited with {ended.returncode} and wrote no result")
        known = json.loads(CONDITIONS.read_text("utf-8"))
        known[file.name] = given
        CONDITIONS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", "utf-8")
    subprocess.run([sys.executable, str(HERE / "draw_tables.py")], check=True)


def confirm(names: Sequence[str], more: Sequence[str]) -> bool:
    """Measure the part of each table, compare it with the stored rows, and note what is the same.

    Args:
        names: of tables that have a part.
        more: further arguments of the script.

    Returns:
        Whether no row differs.
    """
    all_same = True
    for name in names:
        table = TABLES[name]
        now = conditions(("torch",))
        file = RESULTS / table.file.format(torch=str(now["torch"]).partition("+")[0])
        if table.part is None:
            sys.exit(f"{name}: no part can be compared; measure it: python {sys.argv[0]} '{name}'")
        if table.chosen and not more:
            write = f"python {sys.argv[0]} --confirm {name!r} -- {table.chosen}"
            sys.exit(f"{name}: name a part: {write}")
        if not file.exists():
            print(f"{name}: was not measured with torch {now['torch']}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "part.json"
            done = subprocess.run(
                table.command([*table.part, *more], written),
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            if not written.exists():
                last = done.stderr.strip().rpartition("\n")[2]
                print(
                    f"{name}: no result ({last}); it needs {table.needs or 'nothing'}", flush=True
                )
                all_same = False
                continue
            part = json.loads(written.read_text("utf-8"))
        stored = json.loads(file.read_text("utf-8"))
        lines = differences(part, stored, ignored=table.sums, within=table.within)
        if lines:
            print(f"{name}: {len(lines)} differences", *lines[:9], sep="\n  ", flush=True)
            all_same = False
            continue
        known = json.loads(CONDITIONS.read_text("utf-8"))
        missing = differences(stored, part, ignored=table.sums, within=table.within)
        of = "a part" if missing else "all rows"
        kept = {key: now[key] for key in ("date", "commit", "processor")}
        known[file.name]["confirmed"] = {"part": of, **kept}
        CONDITIONS.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
        print(f"{name}: {of} the same", flush=True)
    return all_same


def _written(file: Path) -> int | None:
    return file.stat().st_mtime_ns if file.exists() else None


def main() -> None:
    """Show the tables, or renew those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    parser.add_argument(
        "--confirm", action="store_true",
        help="measure a part of these, or of all that have one, and compare it with the result",
    )  # fmt: skip
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments, more = parser.parse_known_args(given[:end])
    more += given[end + 1 :]
    unknown = set(arguments.tables) - set(TABLES)
    if unknown:
        parser.error(f"unknown tables: {', '.join(sorted(unknown))}. Known: {', '.join(TABLES)}")
    if arguments.confirm:
        named = arguments.tables or [
            name for name, table in TABLES.items() if table.part is not None and not table.chosen
        ]
        sys.exit(0 if confirm(named, more) else 1)
    if arguments.tables:
        renew(arguments.tables, more)
    else:
        show()


if __name__ == "__main__":
    main()
