"""The tables of what several emulated devices were compared with."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TORCH_VERSIONS = ("2.8.0", "2.15.0")
GIB = 2**30
Row = dict[str, Any]


def finetuning() -> str:
    """Peaks of Qwen3.5-0.8B beside those that were published for real cards."""
    found = {
        version: {row["case"]: row for row in _results(f"finetuning-torch-{version}.json")}
        for version in TORCH_VERSIONS
    }
    versions = [next(iter(rows.values())) for rows in found.values()]
    heads = [
        f"torch {row['torch'].partition('+')[0]}, transformers {row['transformers']}"
        for row in versions
    ]
    first, *_ = found.values()
    return _markdown(
        ["case", "published, GiB", *heads],
        [
            [
                name,
                f"{row['published_gib']:.3f}",
                *(_beside(rows[name]["bytes"], row["published_gib"]) for rows in found.values()),
            ]
            for name, row in first.items()
        ],
    )


def _beside(found_bytes: int, published_gib: float) -> str:
    gib = found_bytes / GIB
    return f"{gib:.3f} ({gib / published_gib - 1:+.2%})".replace("%", " %")


def losses() -> str:
    """How far each way to train is off from one process on the CPU."""
    rows = _results("ranks-losses-torch-*.json")
    return _markdown(
        ["training", "ranks", "steps", "losses off by at most"],
        [[row["way"], str(row["ranks"]), str(row["steps"]), f"{row['off']:.1e}"] for row in rows],
    )


def tracker() -> str:
    """The allocator's peaks beside those of torch's tracker."""
    rows = _results("fsdp2-tracker-torch-*.json")
    return _markdown(
        ["model", "allocator, bytes", "tracker"],
        [
            [
                row["case"],
                f"{row['allocator_bytes']:,}",
                f"{row['tracker_bytes'] / row['allocator_bytes'] - 1:+.1%}".replace("%", " %"),
            ]
            for row in rows
        ],
    )


def accelerate() -> str:
    """Peaks in accelerate's test of FSDP beside the bounds of that test."""
    rows = _results("accelerate-peaks-torch-*.json")
    return _markdown(
        ["FSDP", "highest peak of a rank, MB", "accelerate allows, MB"],
        [[row["case"], f"{row['peak_mb']:,}", f"{row['bound_mb']:,}"] for row in rows],
    )


def hostile() -> str:
    """How programs that go wrong ended."""
    (file,) = RESULTS.glob("ranks-hostile-torch-*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    return _markdown(
        ["what goes wrong", "seconds", "rank 0 prints", "rank 1 prints"],
        [
            [
                name,
                f"{max(row['seconds']):.1f}",
                *(_code(line) for line in row["printed"]),
            ]
            for name, row in found.items()
        ],
    )


ISSUE = re.compile(r"github\.com/pytorch/pytorch/(?:issues|pull)/(\d+)")
CAUSES = {
    "is for tensors on the CPU, which NCCL does not send": re.compile(
        r"CPU (?:tensors|models|barrier)|does not support i(?:send|recv)$|send/recv tested by"
    ),
    "is for Gloo": re.compile(r"(?i)\bgloo\b"),
    "is for MPI": re.compile("Only MPI"),
    "calls what NCCL does not have": re.compile(
        "nccl does not support (?:all_gather_coal|send/recv)"
    ),
    "PyTorch has switched it off": ISSUE,
}
"""Why PyTorch's own tests skip on any card, and how the reasons that they give are known."""


def own_tests() -> str:
    """Outcomes of PyTorch's own tests, with the causes of those that did not pass."""
    rows = _results("torch-distributed-torch-*.json")
    passed = [row for row in rows if row["outcome"] == "passed"]
    ran = [row for row in rows if row["outcome"] != "skipped"]
    causes: dict[str, list[Row]] = {}
    for row in rows:
        if row["outcome"] != "passed":
            causes.setdefault(_cause(row), []).append(row)
    ranks = Counter(row["ranks"] for row in passed)
    counts = ", ".join(f"{count} with {number} ranks" for number, count in sorted(ranks.items()))
    table = [["passed", f"{len(passed)} of {len(ran)}", counts]]
    for cause, those in sorted(causes.items(), key=lambda item: -len(item[1])):
        issues = sorted({int(found[1]) for row in those for found in ISSUE.finditer(row["why"])})
        links = ", ".join(
            f"[{number}](https://github.com/pytorch/pytorch/issues/{number})" for number in issues
        )
        table.append(
            [those[0]["outcome"], str(len(those)), f"{cause}: {links}" if links else cause]
        )
    return _markdown(["outcome", "tests", "why"], table)


def files() -> str:
    """How the tests of each file of PyTorch's repository ended."""
    by_file: dict[str, list[Row]] = {}
    for row in _results("torch-distributed-files-torch-*.json"):
        by_file.setdefault(row["file"], []).append(row)
    table = []
    for file, rows in by_file.items():
        ended = Counter(row["outcome"] for row in rows)
        ran = ended["passed"] + ended["failed"]
        ranks = sorted({row["ranks"] for row in rows if row["outcome"] == "passed"})
        numbers = ", ".join(str(number) for number in ranks)
        table.append([f"`{file}`", f"{ended['passed']} of {ran}", str(len(rows) - ran), numbers])
    ran = sum(int(line[1].partition(" of ")[2]) for line in table)
    passed = sum(int(line[1].partition(" of ")[0]) for line in table)
    table.append(["together", f"{passed} of {ran}", str(sum(int(line[2]) for line in table)), ""])
    return _markdown(["file", "passed", "did not run", "devices"], table)


FILE_CAUSES = {
    "needs symmetric memory, which is refused by name": "SymmMem",
    "needs multicast of NVLink": "multicast|alloc_from_pg",
    "shares memory of devices between processes, which is refused by name": "intra_node_comm",
    "asks NCCL how long a call takes, which is refused by name": "test_time_estimate",
    "expects no error, or a later one, in a rank that waits for one that has ended": (
        "test_abort_pg|param_layout_mismatch|nccl_errors_blocking"
    ),
    "measures that work on two streams overlaps, and emulated devices do one after the other": (
        "_overlap$"
    ),
    "needs gigabytes of this machine's memory for each rank": "training_memory_no_gc",
    "sends 200 GB, which takes more than five minutes here": "test_unwaited",
    "is for cards before the H100": "test_broadcast_float8",
}
"""Why tests of PyTorch's files do not pass: what is found in the name of the test or its error."""


def file_causes() -> str:
    """Why tests of the files did not pass, with their number and the shortest of their names."""
    causes: dict[tuple[str, str], list[Row]] = {}
    for row in _results("torch-distributed-files-torch-*.json"):
        if row["outcome"] != "passed":
            found = (
                cause
                for cause, known in FILE_CAUSES.items()
                if re.search(known, row["test"]) or re.search(known, row["why"])
            )
            cause = next(found, _line(row["why"].removeprefix("Skipped: ")))
            causes.setdefault((row["outcome"], cause), []).append(row)
    table = []
    for (outcome, cause), rows in sorted(
        causes.items(), key=lambda item: (item[0][0], -len(item[1]))
    ):
        names = sorted((row["test"].rpartition("::")[2] for row in rows), key=len)
        table.append([outcome, str(len(rows)), cause, f"`{names[0]}`"])
    return _markdown(["outcome", "tests", "why", "such as"], table)


def _cause(row: Row) -> str:
    found = (cause for cause, known in CAUSES.items() if known.search(row["why"]))
    return next(found, _line(row["why"]))


def _line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _code(line: str) -> str:
    text = line.partition("NCCL Last Error: ")[2] or line
    return f"`{text.replace('|', '/')}`" if text else ""


def _results(pattern: str) -> list[Row]:
    (file,) = RESULTS.glob(pattern)
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
