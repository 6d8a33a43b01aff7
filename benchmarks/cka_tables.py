"""The tables of docs/explanation/cka.md: chance, intervals, cost, and passes over activations."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def chance() -> str:
    """How many pairs of unrelated networks the calibrated test takes for related."""
    rows = []
    for row in _results("calibration-amd-epyc-1-thread-torch-*.json"):
        for count in (200, 1000):
            fixed, best, naive = row[f"after_{count}"]
            rows.append(
                [
                    f"{row['networks']}, {row['layers']} layers",
                    row["estimator"],
                    str(count),
                    *(f"{share:.1%}" for share in (fixed, best, naive)),
                ]
            )
    head = ["networks", "estimator", "pairs", "`p` of one pair of layers", "`p_best` of the best"]
    return _markdown([*head, "`p` of the best, not corrected"], rows)


def cost() -> str:
    """CPU time and peak of a comparison with and without resamples, beside the forward pass."""
    rows = []
    for row in _results("calibration-cost-amd-epyc-1-thread-torch-*.json"):
        peak, forward = row["peak_increase_bytes"], row["forward_peak_increase_bytes"]
        rows.append(
            [
                str(row["batch_size"]),
                f"`{row['what']}`" if row["what"].startswith("compare") else row["what"],
                f"{row['cpu_time_ratio']:.2f}",
                f"{peak / 2**20:.2f}",
                f"{peak / forward:.3f}",
            ]
        )
    head = ["batch", "what", "CPU time, × forward", "peak, MB above start", "× forward"]
    return _markdown(head, rows)


def intervals() -> str:
    """How often intervals have the true CKA, and how large the errors should be."""
    rows = []
    for row in _results("confidence-*-torch-*.json"):
        batches = "-"
        if "batches_share" in row:
            batches = f"{row['batches_error']:.4f}; {row['batches_share']:.1%}"
        rows.append(
            [
                f"{row['true']:.3f}",
                f"{row['batches']} × {row['batch_size']}",
                f"{row['deviation']:.4f}",
                f"{row['bootstrap_error']:.4f}; {row['bootstrap_share']:.1%}",
                batches,
            ]
        )
    head = ["true CKA", "batches × samples", "deviation of CKA", "bootstrap: error; share"]
    return _markdown([*head, "batches: error; share"], rows)


def passes() -> str:
    """What the Gram matrices cost in and out of the cache, and what their arithmetic costs."""
    rows = []
    for row in _results("gram-passes-*-torch-*.json"):
        times = (
            row["forward_seconds"],
            row["compare_seconds"],
            row["gram_in_cache_seconds"],
            row["gram_not_in_cache_seconds"],
            row["product_seconds"],
            row["read_seconds"],
        )
        rows.append([str(row["batch_size"]), *(f"{1000 * one:.0f}" for one in times)])
    head = ["batch", "forward", "comparison", "Gram matrices, in the cache", "not in the cache"]
    return _markdown([*head, "their arithmetic", "reading the outputs"], rows)


def measures() -> str:
    """CPU time and peak of measures by neighbours beside CKA."""
    rows = []
    for row in _results("measures-errors-torch-*.json"):
        if row["what"] != "cost":
            continue
        what = row["measure"]
        rows.append(
            [
                str(row["samples"]),
                what if what == "forward pass" else f"`{what}`",
                f"{1000 * row['cpu_seconds']:.0f}",
                f"{row['peak_increase_bytes'] / 2**20:.2f}",
            ]
        )
    return _markdown(["samples", "what", "CPU time, ms", "peak, MB above start"], rows)


def measures_by_chance() -> str:
    """How many pairs of unrelated networks each measure takes for related at 5 %."""
    rows = [
        [f"`{row['measure']}`", str(row["pairs"]), f"{row['p']:.1%}", f"{row['p_best']:.1%}"]
        for row in _results("measures-chance-torch-*.json")
    ]
    return _markdown(
        ["measure", "pairs", "`p` of one pair of layers", "`p_best` of the best"], rows
    )


def parts() -> str:
    """How much CKA varies with the data if batches of 512 are split."""
    rows = []
    whole: dict[str, float] = {}
    for row in _results("measures-parts-torch-*.json"):
        first = whole.setdefault(row["layers"], row["deviation"])
        rows.append(
            [
                row["layers"],
                str(row["part"]),
                f"{row['mean']:.4f}",
                f"{row['deviation']:.4f}",
                f"{row['deviation'] / first:.2f}",
            ]
        )
    return _markdown(["layers", "part", "mean CKA", "standard error", "× of 512"], rows)


def sanity() -> str:
    """How many layers are most similar to the same layer of a network with another seed."""
    found = {
        (row["data"], row["width"], row["epochs"]): row for row in _results("sanity-torch-*.json")
    }
    rows = []
    for data in dict.fromkeys(data for data, *_ in found):
        last = found[data, 16, 16]
        cases = [*((16, epochs) for epochs in (0, 1, 4, 16)), (4, 16)]
        measured = [found.get((data, *each)) for each in cases]
        shares = ["-" if row is None else f"{row['peer']['same']:.0%}" for row in measured]
        accuracy = f"{last['accuracy']:.0%}, {last['accuracy_held_out']:.0%}"
        rows.append([data, accuracy, *shares, f"{last['peer']['beside']:.0%}"])
    head = ["images", "accuracy: trained, held out", "untrained", "1 epoch", "4", "16"]
    return _markdown([*head, "16, width 4", "16, at most one layer off"], rows)


def _results(pattern: str) -> list[Row]:
    (file,) = RESULTS.glob(pattern)
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = (head, ["---"] * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
