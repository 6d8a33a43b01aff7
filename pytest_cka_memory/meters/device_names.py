"""Names of devices that ``--cka-memory-device`` takes; every session imports this for its help."""

KNOWN_DEVICES = (
    *("auto", "cpu", "cuda", "xpu", "mps", "hpu", "npu", "privateuseone"),
    *("predict:cuda", "emulate:cuda"),
)

AFTER_PREDICTING = (
    "this process has used predict:cuda, and torch.accelerator finds no other device afterwards; "
    "measure the two in different processes"
)
"""Why a real or an emulated device cannot be measured any more."""
