"""Print how long a breach takes while many objects are live: the search for what holds tensors.

    python benchmarks/holders_cost.py [--objects 500000] [--against CHECKOUT]

The region has 16 batches; each keeps one tensor in a list, and a limit on growth and one on
retained memory are broken. A second region keeps tensors that only C code references, so that
everything is searched. What explains growth is searched for in the loop, as soon as it is broken,
and again at the region's end; both are counted, and the collection at the end, but not those at the
boundaries of batches. `--against` runs the same with the plugin of another checkout, in turn.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

_BATCHES = 16
_HERE = Path(__file__).resolve().parents[1]
KEPT: list[Any] = []


class Explains:
    """Explains the figures of limits on retained memory and on growth."""

    draws_paths = False

    def __init__(self) -> None:
        self.asked_at: float | None = None
        """The user time when the figures were last asked for, which is before each search."""

    def figures_to_explain(self, record: Any) -> Collection[str]:
        """Return both figures."""
        self.asked_at = os.times().user
        return ("retained_bytes", "growth_bytes_per_batch")

    def named_values(self) -> Mapping[str, Any]:
        """Return no names."""
        return {}


def main() -> None:
    """Run each case in new processes, in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--objects", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--once", choices=["held", "unheld"])
    args = parser.parse_args()
    if args.once:
        print(once(args.once, args.objects))
        return
    checkouts = {"this checkout": _HERE}
    if args.against:
        checkouts["the other"] = args.against.resolve()
    for case in ("held", "unheld"):
        seconds: dict[str, list[float]] = {name: [] for name in checkouts}
        for _ in range(args.repeats):
            for name, folder in checkouts.items():
                seconds[name].append(_in_new_process(folder, case, args.objects))
        for name, times in seconds.items():
            print(f"{case:8}{name:16}{statistics.median(times):6.2f} s of user time")


def once(case: str, objects: int) -> float:
    """Return the seconds of user time for the search in the loop and for the end of the region."""
    import torch

    from pytest_cka_memory import MemoryProbe

    live = [[number] for number in range(objects // 2)]
    live += [{"number": number} for number in range(objects - len(live))]
    explainer, in_loop = Explains(), 0.0
    with MemoryProbe("cpu", explainer=explainer).measure() as opened:
        for _ in range(_BATCHES):
            made = torch.ones(250)
            KEPT.append(made if case == "held" else id(made))
            if case == "unheld":
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
            del made
            explainer.asked_at = None
            opened.batch_done()
            if explainer.asked_at is not None:
                in_loop += os.times().user - explainer.asked_at
        begun = os.times().user
    used = os.times().user - begun
    assert opened.record.retained
    assert opened.record.grown
    assert live
    return in_loop + used


def _in_new_process(folder: Path, case: str, objects: int) -> float:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, __file__, "--once", case, "--objects", str(objects)]
    time.sleep(0.1)
    return float(subprocess.check_output(command, env=environment, text=True))


if __name__ == "__main__":
    main()
