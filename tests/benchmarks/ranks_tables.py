"""The tables of what several emulated devices were compared with."""

import json
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


def own_tests() -> str:
    """Outcomes of PyTorch's own tests, with the reasons that they give for skipping."""
    rows = _results("torch-distributed-torch-*.json")
    counts = Counter((row["outcome"], row["why"] or "") for row in rows)
    ran = len(rows) - sum(row["outcome"] == "skipped" for row in rows)
    return _markdown(
        ["outcome", "tests", "why"],
        [
            [outcome, f"{count} of {ran}" if outcome == "passed" else str(count), _line(why)]
            for (outcome, why), count in sorted(
                counts.items(), key=lambda item: (item[0][0] == "skipped", -item[1], item[0])
            )
        ],
    )


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
