"""The cards that can be predicted: their memory and the size of their workspaces."""

from dataclasses import dataclass

from pytest_cka_memory.errors import DeviceError

_GIB = 2**30

CONTEXT_BYTES = _GIB // 2
"""Memory of a card that the CUDA context uses, so that the allocator cannot.

It is 0.49 GiB in three published out-of-memory messages of single processes ("this process has ...
in use" minus "allocated" and "reserved but unallocated"): A100, L40 and RTX 4090.
"""

# ``parseChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp: ":4096:2:16:8", and
# 32 MiB for compute capability 9, 10 and 12.
_USUAL_WORKSPACE = 2 * 4096 * 1024 + 8 * 16 * 1024
_HOPPER_WORKSPACE = 32 * 2**20
LT_WORKSPACE_BYTES = 2**20
"""The cuBLASLt workspace on any card: ``parseCUDABlasLtWorkspaceSize`` (PyTorch issue 73328)."""


@dataclass(frozen=True)
class Card:
    """One kind of GPU."""

    name: str
    """Its name in ``--cka-memory-device=predict:cuda:NAME``."""
    title: str
    """Its product name, shown in reports."""
    total_bytes: int
    """Its memory as PyTorch reports it: ``total_memory``, "total capacity"."""
    workspace_bytes: int
    """The workspace that PyTorch allocates for cuBLAS, per stream."""

    @property
    def capacity_bytes(self) -> int:
        """The most that the caching allocator can reserve."""
        return self.total_bytes - CONTEXT_BYTES


def _card(name: str, title: str, total_gib: float, workspace_bytes: int = _USUAL_WORKSPACE) -> Card:
    return Card(name, title, int(total_gib * _GIB), workspace_bytes)


# The totals were printed by PyTorch on such a card. They vary by about 0.2 GiB with the driver and
# with ECC; if several were published, this is the smallest.
CARDS = {
    card.name: card
    for card in (
        _card(
            "a100", "NVIDIA A100 80GB", 79.25
        ),  # 79.32 in the notebook that this project started from
        _card("a100-40gb", "NVIDIA A100 40GB", 39.50),
        _card("h100", "NVIDIA H100 80GB", 79.11, _HOPPER_WORKSPACE),
        _card("h100-nvl", "NVIDIA H100 NVL", 93.00, _HOPPER_WORKSPACE),
        _card("l40", "NVIDIA L40", 44.40),
        _card("a10", "NVIDIA A10", 21.99),
        _card("v100", "NVIDIA V100 32GB", 31.74),
        _card("t4", "NVIDIA T4", 14.56),
        _card("rtx4090", "NVIDIA GeForce RTX 4090", 23.52),
        _card("rtx5090", "NVIDIA GeForce RTX 5090", 31.37, _HOPPER_WORKSPACE),
    )
}
DEFAULT_CARD = "a100"
"""The card of ``predict:cuda`` without a name; predictions are checked against figures from it."""


def card_of(name: str) -> Card:
    """Return the card with a name; an empty name means the default card.

    Raises:
        DeviceError: for an unknown name; the message lists the known ones.
    """
    if (name or DEFAULT_CARD) not in CARDS:
        raise DeviceError(
            f"unknown card {name!r}; write predict:cuda, or predict:cuda: and one of "
            f"{', '.join(CARDS)}"
        )
    return CARDS[name or DEFAULT_CARD]
