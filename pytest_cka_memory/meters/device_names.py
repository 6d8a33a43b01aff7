"""Names of devices that ``--cka-memory-device`` takes; every session imports this for its help."""

KNOWN_DEVICES = (
    *("auto", "cpu", "cuda", "xpu", "mps", "hpu", "npu", "privateuseone"),
    "emulate:cuda",
)
