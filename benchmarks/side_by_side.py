"""Run the original notebook's measurements for every library; write tables, figures and a page.

python benchmarks/side_by_side.py --install peers   # once: each library into its own folder
python benchmarks/side_by_side.py --peers peers --json results.json

Tables, figures and page lie beside the JSON file, with its name. With --again nothing is measured;
they are drawn again from that file. With
--device emulate:cuda:a100 no GPU is needed, and no times are taken, because no kernel runs.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import side_by_side_views as views
from libraries import AS_THE_NOTEBOOK, Library
from processes import LIBRARIES, Row, add_options, install, measure
from tqdm import tqdm

from pytest_cka_memory.meters import is_emulated
from pytest_cka_memory.reports.files import write_whole

NETWORK = "resnet18"
BATCH_SIZES = (64, 128, 256, 512)
BATCH_COUNTS = (1, 2, 4, 8, 16)
COUNTED_SIZE = 64


def main() -> None:
    """Measure or read the rows, then write all their views."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument(
        "--samples", type=int, default=1000, help="for each batch size; the notebook has 1000"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="how often each call is timed; 0 for never"
    )
    parser.add_argument("--json", type=Path, default=Path("side-by-side.json"))
    parser.add_argument("--again", action="store_true", help="draw the rows that are in --json")
    args = parser.parse_args()
    if args.install is not None:
        install(args.install)
        return
    if args.again:
        rows = json.loads(args.json.read_text(encoding="utf-8"))
    else:
        rows = list(measured(args))
        write_whole(args.json, json.dumps(rows, indent=1) + "\n")
    print(views.text(rows))
    views.save(rows, args.json.with_name(args.json.name.removesuffix(".json")))


def measured(args: argparse.Namespace) -> Iterator[Row]:
    """Measure every figure of the notebook for every chosen library."""
    jobs: list[tuple[Library, int, int, int]] = []
    repeat = 0 if is_emulated(args.device) else args.repeat
    for name in args.libraries:
        library = LIBRARIES[name]
        jobs += [(library, size, args.samples, repeat) for size in BATCH_SIZES]
        jobs += [(library, COUNTED_SIZE, COUNTED_SIZE * count, 0) for count in BATCH_COUNTS]
    jobs.append((AS_THE_NOTEBOOK, COUNTED_SIZE, COUNTED_SIZE, 0))
    for library, size, samples, times in (bar := tqdm(jobs)):
        bar.set_description(f"{library.name}, {samples} samples in batches of {size}")
        part = "sizes" if samples == args.samples else "counts"
        yield {"part": part, **measure(library, NETWORK, size, samples, times, args)}


if __name__ == "__main__":
    main()
