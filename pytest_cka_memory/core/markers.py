"""Names that users write, with what they read of them; no code, for every session loads this."""

from collections.abc import Mapping

MARKERS: Mapping[str, tuple[str, str]] = {
    "max_retained_mb": (
        "max_retained_mb(1)",
        "At most `limit` MB, or e.g. ``'512 KiB'``, born in the region and alive at its end.",
    ),
    "zero_retention": (
        "zero_retention",
        "Nothing born in the region may be alive at its end.",
    ),
    "max_peak_mb": (
        "max_peak_mb(512)",
        "The peak may rise at most `limit` MB above the level at entry.",
    ),
    "max_reserved_mb": (
        "max_reserved_mb(1024)",
        "The allocator's reserve may rise at most `limit` MB above its level at entry.",
    ),
    "flat_per_batch": (
        "flat_per_batch(tolerance_mb=0.0, warmup=1)",
        "Live memory may grow at most `tolerance_mb` MB a batch after `warmup` batches.",
    ),
    "memory_baseline": (
        'memory_baseline(tolerance="5%")',
        "No figure may be above the committed baseline by more than `tolerance`.",
    ),
}
"""Name -> (an example, what it asks for)."""


KNOWN_DEVICES = ("auto", "cpu", "cuda", "xpu", "mps", "hpu", "npu", "privateuseone", "predict:cuda")
FIXTURE = "cka_memory"
BASELINE_FILE = "cka-memory-baseline.json"
"""Where committed baselines lie unless told otherwise."""


def example_of(name: str) -> str:
    """How a user writes the marker `name`."""
    return MARKERS[name][0]
