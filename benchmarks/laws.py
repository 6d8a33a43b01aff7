"""The law of each model's peak from few sizes, and its prediction at 16 times the largest."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import emulated_cuda

sys.path.insert(0, str(Path(__file__).parent))
TIMES = 16


def main() -> None:
    """Print one row for each model, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    emulated_cuda.load("h100", values=False, total_bytes=2**44)
    import law_models

    from pytest_cka_memory import MemoryProbe

    probe = MemoryProbe("cuda")
    rows = []
    for name, model in law_models.MODELS.items():
        if options.only in name:
            rows.append({"model": name, **_row(probe, model)})
            print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _row(probe: Any, model: Any) -> dict[str, Any]:
    start = time.process_time()
    law = probe.law(model.step(), **model.sizes)
    seconds = time.process_time() - start
    samples = law.fitted.samples
    largest = {
        name: max(sample.point[index] for sample in samples) for index, name in enumerate(law.names)
    }
    values = max(
        len({sample.point[index] for sample in samples}) for index in range(len(law.names))
    )
    far = []
    for name in law.names:
        sizes = {
            **{other: model.sizes[other][-1] for other in law.names},
            name: TIMES * largest[name],
        }
        far.append(_compared(law, sizes))
    return {
        "family": model.family,
        "law": str(law.pieces[-1] if len(law.pieces) > 1 else law.pieces[0]),
        "pieces": len(law.pieces),
        "exact": law.is_exact,
        "switches": len(law.fitted.switches),
        "runs": law.runs,
        "values": values,
        "seconds": round(seconds, 2),
        "far": far,
    }


def _compared(law: Any, sizes: dict[str, int]) -> dict[str, Any]:
    predicted, measured = law.at(**sizes), law.measure(**sizes)
    return {
        "sizes": sizes,
        "predicted": predicted.requested_bytes,
        "measured": measured,
        "off": predicted.requested_bytes - measured,
        "percent": round(100 * abs(predicted.requested_bytes - measured) / measured, 3),
        "safe": predicted.is_safe,
        "doubts": list(predicted.doubts),
    }


if __name__ == "__main__":
    main()
