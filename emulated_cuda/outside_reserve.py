"""What processes had of a card beside the reserve of torch's allocator, as others published it.

It is the CUDA context, the kernels that were loaded until then, and what libraries allocate
themselves: NCCL above all. torch says it when memory runs out: "this process has ... in use", less
what it says is allocated, and what is reserved but unallocated. No figure of an emulated card
includes it; :data:`emulated_cuda.cards.CONTEXT_BYTES` is what the allocator can never have.
"""

from dataclasses import dataclass

from emulated_cuda.cards import Card

_GIB = 2**30
_ENOUGH = 2
"""Rows of a card's generation that make a range; with fewer, those of all cards do."""


@dataclass(frozen=True)
class Published:
    """One process on a card."""

    card: str
    capability: tuple[int, int]
    gib: float
    """GiB beside the reserve."""
    source: str
    ranks: int = 1
    """Processes that communicate over NCCL; 1 without it."""
    year: int = 2025
    """When it was published. Versions are seldom named; all have torch 2.1 or later."""


def _issue(repository: str, number: int) -> str:
    return f"https://github.com/{repository}/issues/{number}"


PUBLISHED = (
    Published("T4", (7, 5), 0.13, _issue("Zheng-Chong/CatVTON", 133)),
    Published("T4", (7, 5), 0.12, _issue("AlphaGPU/leetgpu-challenges", 52)),
    Published("RTX 2080 Ti (11 GB)", (7, 5), 0.19, _issue("lllyasviel/FramePack", 369)),
    Published("A100 40GB", (8, 0), 0.49, _issue("TianheWu/CoSeR", 10)),
    Published("A100 80GB", (8, 0), 0.40, _issue("HiDream-ai/VAREdit", 6)),
    Published("RTX 4090", (8, 9), 0.49, _issue("3DTopia/Phidias-Diffusion", 8)),
    Published("RTX 4090", (8, 9), 0.46, _issue("pinokiofactory/flux-webui", 11), year=2024),
    Published("RTX 6000 Ada", (8, 9), 0.42, _issue("DINGYANB/MTVCrafter", 21)),
    Published("H100 NVL", (9, 0), 0.66, _issue("ali-vilab/VACE", 56)),
    Published("GH200", (9, 0), 0.74, _issue("Lightning-AI/litgpt", 1892), year=2024),
    Published("RTX 5090", (12, 0), 0.58, _issue("Wan-Video/Wan2.1", 465)),
    Published("A100 80GB", (8, 0), 1.43, _issue("wbfwonderful/Vad-R1", 11), ranks=4, year=2026),
    Published("V100 32GB", (7, 0), 1.62, _issue("rwth-i6/returnn", 1469), ranks=16, year=2023),
)
"""Messages of which the card is known, from threads of public repositories."""


def range_of(card: Card, *, with_nccl: bool = False) -> tuple[int, int]:
    """Return the least and the most that such processes had beside the reserve, in bytes.

    Args:
        card: those of its compute capability count, or all if there are fewer than two.
        with_nccl: whether the process communicates: then those that did raise the upper end.

    >>> from emulated_cuda.cards import card_of
    >>> [round(size / 2**30, 2) for size in range_of(card_of("t4"))]
    [0.12, 0.19]
    """
    alone = [row for row in PUBLISHED if row.ranks == 1]
    own = [row.gib for row in alone if row.capability == card.hardware.capability]
    sizes = own if len(own) >= _ENOUGH else [row.gib for row in alone]
    most = max(sizes)
    if with_nccl:
        most = max(most, *(row.gib for row in PUBLISHED if row.ranks > 1))
    return int(min(sizes) * _GIB), int(most * _GIB)


def condition(card: Card, left_bytes: int, *, with_nccl: bool = False) -> str:
    """Return under which condition a reserve fits a card; empty if what is left surely suffices.

    Args:
        card: the card.
        left_bytes: its memory without the reserve.
        with_nccl: whether the process communicates.
    """
    least, most = range_of(card, with_nccl=with_nccl)
    if left_bytes >= most:
        return ""
    users = "the CUDA context, loaded kernels and NCCL" if with_nccl else _WITHOUT_NCCL
    return (
        f"if {users} take no more than the {_mb(left_bytes)} beside it: {_mb(least)} to "
        f"{_mb(most)} were seen on such cards"
    )


_WITHOUT_NCCL = "the CUDA context and loaded kernels"


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"
