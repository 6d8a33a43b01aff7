"""One family of layers or functions: what each of its cases asks for.

    python benchmarks/card/card_family.py FAMILY LINES

Runs on the card of this process, real or emulated, and appends one line of JSON for each case. A
process that is started again goes on behind the last case of the file.
"""

import gc
import json
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from asked import requests
from card_functions import FAMILIES

ENDED = ("device-side assert", "illegal memory", "misaligned address", "CUBLAS_STATUS_EXECUTION")
"""Errors after which a card computes nothing more in this process."""


def main() -> None:
    """Run a family."""
    family, path = sys.argv[1], Path(sys.argv[2])
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    done = {row.get("begin") or row.get("name") for row in map(json.loads, lines)}
    torch.cuda.init()
    gc.collect()
    gc.freeze()
    with path.open("a", encoding="utf-8") as file:
        for key, make in FAMILIES[family]():
            name = f"{family}: {key}"
            if name in done:
                continue
            print(json.dumps({"begin": name}), file=file, flush=True)
            try:
                parts = make()
                row = requests(*parts)
                del parts
            except Exception as error:
                row = {"failed": f"making: {type(error).__name__}: {str(error)[:200]}"}
            print(json.dumps({"name": name, "rows": {"": [row]}}), file=file, flush=True)
            if any(word in str(row.get("failed")) for word in ENDED):
                sys.exit(3)


if __name__ == "__main__":
    main()
