"""Compare the bundled CKA with other published libraries, relative to the bare forward pass.

python benchmarks/compare.py --install peers     # once: each library into its own folder
python benchmarks/compare.py --peers peers --json results.json
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from networks import NETWORKS
from processes import LIBRARIES, Row, add_options, install, measure
from tabulate import tabulate
from tqdm import tqdm

from pytest_cka_memory.reports.files import write_whole
from pytest_cka_memory.units import MB


def table(rows: Sequence[Row]) -> str:
    """Return a table of all rows; ratios are to the bare forward pass of the same process."""
    shown = [
        {
            "network": row["network"],
            "batch": row["batch_size"],
            "library": row["library"],
            **(
                {"peak MB": row["skipped"]}
                if "skipped" in row
                else {
                    "peak MB": f"{row['peak_increase_bytes'] / MB:.2f}",
                    "x forward": f"{row['peak_ratio']:.3f}",
                    "retained MB": f"{row['retained_bytes'] / MB:.2f}",
                    "seconds": f"{row['seconds']:.2f}",
                    "time x forward": f"{row['time_ratio']:.2f}",
                }
            ),
        }
        for row in rows
    ]
    return tabulate(shown, headers="keys", disable_numparse=True)


def main() -> None:
    """Measure every combination and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[64, 256, 512])
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument(
        "--repeat",
        type=int,
        default=3,
        help="how often each call is timed; the table has the median",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.repeat < 1:
        parser.error(f"--repeat is {args.repeat}; the table contains times, so write 1 or more")
    if args.install is not None:
        install(args.install)
        return
    jobs = [
        (LIBRARIES[name], network, size)
        for network in args.networks
        for size in args.batch_sizes
        for name in args.libraries
    ]
    rows = []
    for library, network, size in (bar := tqdm(jobs)):
        bar.set_description(f"{library.name}, {network}, batch {size}")
        rows.append(measure(library, network, size, size * args.batches, args.repeat, args))
        if args.json is not None:  # each time, so that no later error can lose the measurements
            write_whole(args.json, json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
