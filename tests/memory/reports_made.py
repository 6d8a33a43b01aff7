"""Example reports, shared by the tests of the report formats."""

from dataclasses import replace

from pytest_cka_memory.core.conditions import Fingerprint
from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.retention import Holding, Sample
from pytest_cka_memory.core.verdicts import Result, judge
from pytest_cka_memory.limits import limit_from_marker
from pytest_cka_memory.units import MB

CPU = Fingerprint("cpu", "exact", "2.15", None)
GPU = Fingerprint("NVIDIA H200", "allocator", "2.15", "13.2")
SESSION = {
    "device": "cuda:0",
    "device_name": "A100",
    "meter": "PyTorch's caching allocator",
    "notes": ["memory outside the allocator is not seen"],
    "conditions": {},
    "torch": "2.15.0",
    "cuda": "13.2",
    "python": "3.11.7",
    "plugin": "0.1.0",
    "workers": 1,
    "started": "2026-01-02T03:04:05+00:00",
}
HOSTILE = (
    "</script><img src=x onerror=alert(1)> |`a``b`| \n\x1b[31m "
    "@user #1 http://x.y <!-- \u2028 *b* \\"
)
"""Text with characters that are special in HTML, Markdown, a terminal or a script."""

ZERO = limit_from_marker("zero_retention", (), {})
FLAT = limit_from_marker("flat_per_batch", (), {})
RESERVED = limit_from_marker("max_reserved_mb", (1,), {})
LOSSES = Holding(
    bytes=36,
    count=9,
    dtype="float32",
    shape=(),
    operator="aten.sum",
    created_at=("train.py:12 in step", "train.py:40 in fit"),
    held_by="train.LOSSES[0]",
    hint="keep loss.item() instead of the tensor, which keeps its autograd graph alive",
    batches=9,
    code="(weight * batch).sum()",
)


def record(label: str = "", *, retained_bytes: int = 0, batches: int = 9, **rest) -> RegionRecord:
    """A record that starts at 42 MB and peaks at 100 MB.

    The retained bytes are spread evenly over the batches.
    """
    each = retained_bytes // max(1, batches)
    levels = [42 * MB + each * number for number in range(1, batches + 1)]
    samples = (Sample(n, 64, level, level, level + MB) for n, level in enumerate(levels, 1))
    figures = {
        "start_bytes": 42 * MB,
        "end_bytes": 42 * MB + retained_bytes,
        "peak_bytes": 100 * MB,
        "completed": True,
        "timeline": tuple(samples),
        **rest,
    }
    return RegionRecord(label=label, retained_bytes=retained_bytes, **figures)


def kept(nodeid: str = "t.py::test_kept", label: str = "", **figures) -> Result:
    """A result that is within its limit."""
    return judge(nodeid, record(label, **figures), [ZERO])


def broken(nodeid: str = "t.py::test_leak[64]", label: str = "train") -> Result:
    """A result that exceeds two limits, both because of the same bytes."""
    leaking = record(label, retained_bytes=36, retained=(LOSSES,), grown=(LOSSES,))
    return judge(nodeid, leaking, [ZERO, FLAT])


def one_of_each() -> Report:
    """A report with one result per verdict, a missing test and two tests that were not measured.

    Two of the results are not judged, each for its own reason.
    """
    results = (
        kept(),
        broken(),
        judge("t.py::test_free", record(), []),
        judge("t.py::test_cpu", record(), [RESERVED]),
        replace(judge("t.py::test_fails", record(completed=False), [ZERO]), outcome="failed"),
    )
    return Report(SESSION, results, ("t.py::test_lost",), {"odd items": 2})


def hostile() -> Report:
    """A report in which every text is `HOSTILE`."""
    holding = replace(
        LOSSES,
        held_by=HOSTILE,
        created_at=(HOSTILE,),
        hint=HOSTILE,
        operator=HOSTILE,
        code=HOSTILE,
    )
    bad = broken(HOSTILE, HOSTILE)
    bad = replace(bad, record=replace(bad.record, retained=(holding,)), worker=HOSTILE)
    breaches = tuple(replace(b, limit=HOSTILE, message=HOSTILE) for b in bad.breaches)
    session = {**SESSION, "device_name": HOSTILE, "meter": HOSTILE, "notes": [HOSTILE]}
    result = replace(bad, breaches=breaches)
    return Report(session, (result,), (HOSTILE,), {HOSTILE: 1}, problems=(HOSTILE,))


def many(count: int, batches: int = 16) -> Report:
    """A report with `count` regions, of which every sixth leaks."""
    results = [
        broken(f"tests/test_{n % 50}.py::TestNet::test_training_step[{n}-resnet18]", f"epoch {n}")
        if n % 6 == 1
        else kept(
            f"tests/test_{n % 50}.py::TestNet::test_training_step[{n}-resnet18]", batches=batches
        )
        for n in range(count)
    ]
    return Report(SESSION, tuple(results))
