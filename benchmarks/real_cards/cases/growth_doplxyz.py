"""Blocks larger than max_split_size in expandable segments: the reserve grows with each cycle."""

from case import Case, Figure

MIB = 2**20
# Cycle -> MiB that were allocated and reserved after it.
PUBLISHED = {
    0: ("66", "220"),
    20: ("106", "2980"),
    40: ("146", "5760"),
    60: ("186", "8520"),
    80: ("226", "11300"),
    100: ("266", "14060"),
}

CASE = Case(
    title="Blocks of 91, 45.5 and 2 MiB in 101 cycles, 128 MiB as the largest size that is split",
    source="https://github.com/pytorch/pytorch/pull/193400",
    kind="reserve",
    card="t4",
    memory="16GiB",
    real="a Radeon RX 9070 XT of 16 GiB, with the same allocator; torch 2.12.0",
    torch="2.12",
    figures={
        f"cycle {cycle}, {name}": Figure(printed, "MiB", name)
        for cycle, row in PUBLISHED.items()
        for name, printed in zip(("allocated", "reserved"), row, strict=True)
    },
    environment={"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"},
    differs="64 MiB that are allocated before the first cycle follow from the figures.",
)


def measured(run: str) -> dict[str, int]:
    """Allocate two large blocks and a small one in each cycle; only the small ones stay."""
    import torch

    def block(mib: float) -> torch.Tensor:
        return torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")

    kept = [block(64)]
    found = {}
    for cycle in range(max(PUBLISHED) + 1):
        first, second = block(91), block(45.5)
        kept.append(block(2))
        del first, second
        if cycle in PUBLISHED:
            found[f"cycle {cycle}, allocated"] = torch.cuda.memory_allocated()
            found[f"cycle {cycle}, reserved"] = torch.cuda.memory_reserved()
    return found
