"""The law of each model's peak from few sizes, and its prediction at 16 times the largest.

python benchmarks/laws.py [--only NAME] [--json FILE]

20 models of 9 families on an emulated H100 without values, each with a training step whose sizes
are doubled twice; one more is a language model under FSDP on 4 emulated cards. Each size is then
measured at 16 times the largest value of it that the law was found from, with the others at their
largest given ones.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
TIMES = 16
CARD_BYTES = 2**44
"""More than a card has, so that what is predicted can be measured."""


def main() -> None:
    """Print one row for each model, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    import emulated_cuda

    emulated_cuda.load("h100", values=False, total_bytes=CARD_BYTES)
    import law_models

    from pytest_cka_memory import MemoryProbe

    probe = MemoryProbe("cuda")
    rows = []
    for name, model in law_models.MODELS.items():
        if options.only in name:
            rows.append({"model": name, **row_of(probe, model)})
            print(json.dumps(rows[-1]), flush=True)
    if options.only in "FSDP":
        rows.append({"model": "GPT under FSDP, 4 ranks", **_of_ranks()})
        print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _of_ranks() -> dict[str, Any]:
    """Return the row of rank 0."""
    options = ["--card", "h100", "--devices", "4", "--no-values"]
    program = ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
    script = str(Path(__file__).with_name("law_ranks.py"))
    run = subprocess.run(
        [sys.executable, "-m", "emulated_cuda", *options, *program, script],
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("ROW "))
    found: dict[str, Any] = json.loads(line.removeprefix("ROW "))
    return found


def row_of(probe: Any, model: Any) -> dict[str, Any]:
    """Return the law of a model, and how far it is from what was measured."""
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
