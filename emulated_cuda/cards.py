"""The cards that can be emulated: their memory, and what processes had of it beside the reserve.

Beside the reserve of torch's allocator, a process uses memory for the CUDA context, for kernels as
they are loaded, and for what libraries allocate themselves, NCCL above all. How much is known from
published messages of ``torch.OutOfMemoryError``: what "this process has ... in use", less what is
allocated by PyTorch, and less what is reserved but unallocated. No figure of an emulated card
includes this memory; `CONTEXT_BYTES` is what the allocator can never have.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from emulated_cuda.errors import DeviceError

_GIB = 2**30

CONTEXT_BYTES = _GIB // 2
"""Memory of a card that the CUDA context uses, so that the allocator cannot: 512 MB.

It is 0.49 GiB in three published out-of-memory messages of single processes ("this process has ...
in use" minus "allocated" and "reserved but unallocated"): A100, L40 and RTX 4090.
"""


@dataclass(frozen=True)
class Hardware:
    """The properties of a card that CUDA reports, beside its memory."""

    name: str
    """The device's name, as ``torch.cuda.get_device_name`` returns it."""
    capability: tuple[int, int]
    multiprocessors: int
    l2_mib: int
    shared_kib: int
    """Shared memory of a multiprocessor; a block can have all but 1 KiB of it."""
    threads: int
    """Resident threads of a multiprocessor."""
    blocks: int
    """Resident blocks of a multiprocessor."""
    clock_mhz: int
    memory_clock_mhz: int
    memory_bus_bits: int
    power_watts: int
    """Its limit of power."""
    pci_device: int
    """The number of this kind of card on the PCI bus."""

    @property
    def block_shared_kib(self) -> int:
        """Shared memory of a block that opts in; before Ampere none was reserved."""
        return self.shared_kib - (1 if self.capability >= (8, 0) else 0)


@dataclass(frozen=True)
class Card:
    """One kind of GPU."""

    name: str
    """Its key in :data:`CARDS`."""
    title: str
    """Its product name, shown in reports."""
    total_bytes: int
    """Its memory as PyTorch reports it: ``total_memory``, "total capacity"."""
    hardware: Hardware


def _card(name: str, title: str, total_gib: float, hardware: Hardware) -> Card:
    return Card(name, title, int(total_gib * _GIB), hardware)


# The totals were printed by PyTorch on such a card. They vary by about 0.2 GiB with the driver and
# with ECC; if several were published, this is the smallest. Hardware: device name, compute
# capability, multiprocessors, L2 in MiB; per multiprocessor KiB of shared memory, threads and
# blocks; MHz of the multiprocessors and of the memory, and the width of its bus in bits; watts
# and the PCI device, as the product's data sheet and the PCI ID database have them.
CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        _card(
            *("a100", "NVIDIA A100 80GB", 79.25),  # 79.32 in the original notebook
            Hardware(
                *("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40, 164, 2048, 32),
                *(1410, 1593, 5120, 400, 0x20B2),
            ),
        ),
        _card(
            *("a100-40gb", "NVIDIA A100 40GB", 39.50),
            Hardware(
                *("NVIDIA A100-SXM4-40GB", (8, 0), 108, 40, 164, 2048, 32),
                *(1410, 1215, 5120, 400, 0x20B0),
            ),
        ),
        _card(
            *("h100", "NVIDIA H100 80GB", 79.11),
            Hardware(
                *("NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 228, 2048, 32),
                *(1980, 2619, 5120, 700, 0x2330),
            ),
        ),
        _card(
            *("h100-nvl", "NVIDIA H100 NVL", 93.00),
            Hardware(
                *("NVIDIA H100 NVL", (9, 0), 132, 50, 228, 2048, 32),
                *(1785, 2619, 6016, 400, 0x2321),
            ),
        ),
        _card(
            *("l40", "NVIDIA L40", 44.40),
            Hardware(
                *("NVIDIA L40", (8, 9), 142, 96, 100, 1536, 24),
                *(2490, 9001, 384, 300, 0x26B5),
            ),
        ),
        _card(
            *("a10", "NVIDIA A10", 21.99),
            Hardware(
                *("NVIDIA A10", (8, 6), 72, 6, 100, 1536, 16),
                *(1695, 6251, 384, 150, 0x2236),
            ),
        ),
        _card(
            *("v100", "NVIDIA V100 32GB", 31.74),
            Hardware(
                *("Tesla V100-SXM2-32GB", (7, 0), 80, 6, 96, 2048, 32),
                *(1530, 877, 4096, 300, 0x1DB5),
            ),
        ),
        _card(
            *("t4", "NVIDIA T4", 14.56),
            Hardware(
                *("Tesla T4", (7, 5), 40, 4, 64, 1024, 16),
                *(1590, 5001, 256, 70, 0x1EB8),
            ),
        ),
        _card(
            *("rtx4090", "NVIDIA GeForce RTX 4090", 23.52),
            Hardware(
                *("NVIDIA GeForce RTX 4090", (8, 9), 128, 72, 100, 1536, 24),
                *(2520, 10501, 384, 450, 0x2684),
            ),
        ),
        _card(
            *("rtx5090", "NVIDIA GeForce RTX 5090", 31.37),
            Hardware(
                *("NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 100, 1536, 24),
                *(2407, 14001, 512, 575, 0x2B85),
            ),
        ),
    )
}
"""The cards that can be emulated, by the names that ``load`` and ``--card`` take.

>>> from emulated_cuda import CARDS
>>> CARDS["t4"].title, round(CARDS["t4"].total_bytes / 2**30, 2)
('NVIDIA T4', 14.56)
"""
DEFAULT_CARD = "a100"
"""The card that is emulated if none is named; its figures are compared with published ones."""
LARGEST_CARD = max(CARDS.values(), key=lambda card: card.total_bytes).name
"""The card with the most memory."""


def card_of(name: str) -> Card:
    """Return the card with a name.

    Args:
        name: a key of :data:`CARDS`.

    Raises:
        DeviceError: for an unknown name; the message lists the known ones.
    """
    if name not in CARDS:
        raise DeviceError(f"unknown card {name!r}; write one of {', '.join(CARDS)}")
    return CARDS[name]


_ENOUGH = 2
"""Rows of a card's generation that make a range; with fewer, those of all cards do."""


@dataclass(frozen=True)
class Published:
    """A published figure: the memory that one process used beside the allocator's reserve."""

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


PUBLISHED_OUTSIDE_RESERVE = (
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
    Published("H100 80GB", (9, 0), 0.79, "../explanation/h100.md", year=2026),
    Published("RTX 5090", (12, 0), 0.58, _issue("Wan-Video/Wan2.1", 465)),
    Published("A100 80GB", (8, 0), 1.43, _issue("wbfwonderful/Vad-R1", 11), ranks=4, year=2026),
    Published("V100 32GB", (7, 0), 1.62, _issue("rwth-i6/returnn", 1469), ranks=16, year=2023),
)
"""Messages whose card is known, from threads of public repositories; and our own figure."""


def outside_reserve_of(card: Card, *, with_nccl: bool = False) -> tuple[int, int]:
    """Return the least and the most bytes that published processes had beside the reserve.

    Args:
        card: figures of cards with its compute capability are used, or those of all cards if there
            are fewer than two of them.
        with_nccl: whether the process communicates over NCCL. Figures of processes that did are
            used only for the upper end, and only then.

    >>> from emulated_cuda.cards import card_of, outside_reserve_of
    >>> [round(size / 2**30, 2) for size in outside_reserve_of(card_of("t4"))]
    [0.12, 0.19]
    """
    alone = [row for row in PUBLISHED_OUTSIDE_RESERVE if row.ranks == 1]
    own = [row.gib for row in alone if row.capability == card.hardware.capability]
    sizes = own if len(own) >= _ENOUGH else [row.gib for row in alone]
    most = max(sizes)
    if with_nccl:
        most = max(most, *(row.gib for row in PUBLISHED_OUTSIDE_RESERVE if row.ranks > 1))
    return int(min(sizes) * _GIB), int(most * _GIB)


def condition_to_fit(card: Card, left_bytes: int, *, with_nccl: bool = False) -> str:
    """Return under which condition a reserve fits a card; empty if what is left surely suffices.

    Args:
        card: the card.
        left_bytes: its memory without the reserve.
        with_nccl: whether the process communicates.
    """
    least, most = outside_reserve_of(card, with_nccl=with_nccl)
    if left_bytes >= most:
        return ""
    users = "the CUDA context, loaded kernels and NCCL" if with_nccl else _WITHOUT_NCCL
    return (
        f"if {users} take no more than the {_mb(left_bytes)} that remain; on such cards they took "
        f"{_mb(least)} to {_mb(most)}"
    )


_WITHOUT_NCCL = "the CUDA context and loaded kernels"


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"
