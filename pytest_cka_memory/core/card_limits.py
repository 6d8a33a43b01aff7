"""The limit that a region fits the memory of cards, also of cards on which it did not run."""

from dataclasses import dataclass

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.verdicts import Breach, Limit, Verdict
from pytest_cka_memory.units import format_exact, format_with_unit


@dataclass(frozen=True)
class CardMemory:
    """The memory of one card, in bytes."""

    name: str
    total_bytes: int
    context_bytes: int
    """What the CUDA context takes of it, so that torch's allocator cannot."""

    @property
    def usable_bytes(self) -> int:
        """What torch's allocator can have."""
        return self.total_bytes - self.context_bytes


@dataclass(frozen=True)
class FitsCards(Limit):
    """The peak may be at most what the allocator can have on each of the cards.

    On one of these cards, emulated or not, a region that needs more ends with torch's error, so a
    broken limit is always an estimate from the peak on another device.
    """

    cards: tuple[CardMemory, ...]

    def judge(self, record: RegionRecord) -> Verdict:
        """Return None if the peak, with what was live before the region, fits every card."""
        smallest = min(self.cards, key=lambda card: card.usable_bytes)
        if record.peak_bytes <= smallest.usable_bytes:
            return None
        found = "; ".join(_words(card, record.peak_bytes) for card in self.cards)
        message = (
            f"peak {format_exact(record.peak_bytes)}, without the CUDA context of "
            f"{format_with_unit(smallest.context_bytes)}: {found}. This is an estimate from the "
            "peak on the measured device"
        )
        return Breach(self.text, smallest.usable_bytes, record.peak_bytes, message, "peak_bytes")


def _words(card: CardMemory, peak_bytes: int) -> str:
    room = card.usable_bytes - peak_bytes
    size = format_with_unit(abs(room))
    of = f"of {format_with_unit(card.total_bytes)}"
    return (
        f"fits {card.name} {of}, {size} head room"
        if room >= 0
        else (f"does not fit {card.name} {of}, {size} missing")
    )
