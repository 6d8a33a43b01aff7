"""Put what a card's programs asked for beside what they asked for on an emulated one.

    python benchmarks/card/compare_card.py CARD EMULATED [--differences KIND] [--json FILE]

Both are folders that ``run_card.py`` wrote.
"""

import argparse
import difflib
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

KINDS = ("programs", "layers", "operators")


def read(folder: Path, kind: str) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the rows of each operator, layer or program: a type or nothing, and what it asked."""
    file = folder / f"{kind}.jsonl.gz"
    if not file.exists():
        return {}
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for line in gzip.decompress(file.read_bytes()).decode().splitlines():
        row = json.loads(line)
        if "name" in row:
            found[row["name"]] = [(dtype, r) for dtype, rows in row["rows"].items() for r in rows]
    return found


def rounded(size: int) -> int:
    """Return how many bytes of a block a request takes; negative for a free."""
    return (abs(size) + 511) // 512 * 512 * (1 if size >= 0 else -1)


def outcome(card: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return in what two rows are equal: the first of several words that holds."""
    if "failed" in card or "failed" in here:
        if "failed" in card and "failed" in here:
            return "fails on both"
        return "fails on the card" if "failed" in card else "fails here"
    if card["events"] == here["events"]:
        return "equal"
    if Counter(card["events"]) == Counter(here["events"]):
        return "another order"
    if list(map(rounded, card["events"])) == list(map(rounded, here["events"])):
        return "equal blocks"
    if (card["peak"], card["retained"]) == (here["peak"], here["retained"]):
        return "equal peak"
    return "different"


def difference(card: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return what only one of two rows asked for."""
    if "failed" in card or "failed" in here:
        return f"card: {card.get('failed', 'ok')}; here: {here.get('failed', 'ok')}"
    matcher = difflib.SequenceMatcher(None, card["events"], here["events"], autojunk=False)
    parts = [
        f"{card['events'][a:b][:6]} for {here['events'][c:d][:6]}"
        for kind, a, b, c, d in matcher.get_opcodes()
        if kind != "equal"
    ]
    return f"peak {card['peak']} for {here['peak']}; " + "; ".join(parts[:3])


def pairs(
    card: Path, here: Path, kind: str
) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Yield each row that both folders have and that did not fail on the card, with its name."""
    ours = read(here, kind)
    for name, rows in read(card, kind).items():
        for (dtype, row), (_, other) in zip(rows, ours.get(name, []), strict=False):
            if "failed" not in row:
                yield name, dtype, row, other


def row(name: str, card: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return one comparison for a result."""
    found = {"name": name, "outcome": outcome(card, here)}
    for side, values in (("card", card), ("here", here)):
        if "failed" in values:
            found[f"{side}_failed"] = values["failed"]
            continue
        found |= {f"{side}_{kind}": values[kind] for kind in ("peak", "peak_reserved")}
        found[f"{side}_events"] = len(values["events"])
    return found


def result(card: Path, here: Path) -> dict[str, Any]:
    """Return all comparisons, with what is known of both sides."""
    return {
        "card": json.loads((card / "about.json").read_text("utf-8")),
        "emulated": json.loads((here / "about.json").read_text("utf-8")),
        **{
            kind: [row(f"{name} {case}".rstrip(), a, b) for name, case, a, b in compared]
            for kind in KINDS
            if (compared := [*pairs(card, here, kind)]) or kind != "operators"
        },
    }


def main() -> None:
    """Print counts; write the result, and print the differences, if they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("card", type=Path)
    parser.add_argument("emulated", type=Path)
    parser.add_argument("--differences", choices=KINDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for kind in KINDS:
        counts = Counter(
            outcome(a, b) for _, _, a, b in pairs(options.card, options.emulated, kind)
        )
        print(f"{kind}: {sum(counts.values())} rows,", dict(counts.most_common()))
    if options.json:
        found = result(options.card, options.emulated)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.differences:
        for name, dtype, a, b in pairs(options.card, options.emulated, options.differences):
            told = outcome(a, b)
            if told not in ("equal", "fails on both"):
                print(f"{name} {dtype}: {told}: {difference(a, b)}")


if __name__ == "__main__":
    main()
