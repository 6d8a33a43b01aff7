"""``fits``: the peak of a region against the memory of cards, to the byte."""

import pytest

from emulated_cuda import cards
from emulated_cuda.cards import CARDS, CONTEXT_BYTES

T4 = CARDS["t4"].total_bytes - CONTEXT_BYTES
"""What a T4 leaves to torch's allocator."""
SOURCE = """
import pytest

@pytest.mark.fits({cards})
def test_one(cka_memory, meter):
    meter.free(meter.allocate({size}))
"""


@pytest.mark.parametrize("extra", [0, 1], ids=["equal", "one-byte-more"])
def test_a_peak_up_to_the_memory_of_the_card_fits(scripted, extra: int) -> None:
    """A peak fits up to the byte that the CUDA context leaves of the smallest card."""
    run = scripted(SOURCE.format(cards='"a10", "t4"', size=T4 + extra))
    run.assert_outcomes(passed=1 - extra, failed=extra)
    for breach in run.region["breaches"]:
        assert breach["figure"] == "peak_bytes"
        assert breach["allowed_bytes"] == T4
        assert breach["limit"] == "fits('a10', 't4')"


def test_message_has_what_is_missing_and_the_head_room(scripted) -> None:
    """The message says what is missing or free on each card, and that this is an estimate."""
    run = scripted(SOURCE.format(cards='"t4", "a10"', size=T4 + 2**30))
    (breach,) = run.region["breaches"]
    room = (CARDS["a10"].total_bytes - CARDS["t4"].total_bytes - 2**30) / 2**20
    assert "does not fit t4 of 14909.4 MB, 1024.00 MB missing; fits a10 of " in breach["message"]
    assert f"{room:.2f} MB headroom" in breach["message"]
    assert breach["message"].endswith("This is an estimate from the peak on the measured device")


H100 = CARDS["h100"].total_bytes
SEEN = cards.outside_reserve_of(CARDS["h100"])
"""The least and the most that processes had beside the reserve on cards like an H100."""


def test_card_that_fits_only_with_a_small_context_says_so(scripted) -> None:
    """Where less is left than the context took on such cards, "fits" has a condition."""
    run = scripted(SOURCE.format(cards='"t4", "h100"', size=H100 - CONTEXT_BYTES - 2**20))
    (breach,) = run.region["breaches"]
    assert "1.00 MB headroom, if 513.00 MB suffice for the CUDA context" in breach["message"]
    assert "675.84 MB to 808.96 MB were seen on such cards" in breach["message"]


@pytest.mark.parametrize("extra", [0, 1], ids=["equal", "one-byte-more"])
@pytest.mark.parametrize(
    ("beside", "kept"), [('"seen"', SEEN[1]), ("300", 300 * 2**20), ('"1 GB"', 2**30)]
)
def test_memory_beside_the_peak_can_be_kept_free(
    scripted, beside: str, kept: int, extra: int
) -> None:
    """``beside`` is what is kept free: a size, or the most that was seen on such cards."""
    arguments = f'"h100", beside={beside}'
    run = scripted(SOURCE.format(cards=arguments, size=H100 - kept + extra))
    run.assert_outcomes(passed=1 - extra, failed=extra)
    for breach in run.region["breaches"]:
        assert breach["limit"] == f"fits({arguments})".replace('"', "'")
        assert breach["allowed_bytes"] == H100 - kept


@pytest.mark.parametrize("beside", ['"much"', "-1", "True"])
def test_memory_beside_that_is_not_a_size_is_refused(scripted, beside: str) -> None:
    """What is neither a size nor "seen" is a usage error before any test."""
    run = scripted(SOURCE.format(cards=f'"h100", beside={beside}', size=1))
    run.assert_refused("memory size")


@pytest.mark.parametrize(
    ("cards", "wrong"), [('"t5"', "unknown card 't5'"), ("", "no card is named")]
)
def test_unknown_cards_are_refused_with_a_list(scripted, cards: str, wrong: str) -> None:
    """A card that is not known is a usage error before any test, with the names of cards."""
    run = scripted(SOURCE.format(cards=cards, size=1))
    run.assert_refused(f"fits({cards.replace(chr(34), chr(39))}): {wrong}", "t4, rtx4090")


@pytest.mark.emulates
def test_on_an_emulated_card_the_allocator_judges(session) -> None:
    """On the named card itself the allocator refuses what does not fit; on another it is judged."""
    source = """
        import pytest
        import torch

        @pytest.mark.fits("t4")
        def test_too_large():
            torch.empty(15 * 2**30, dtype=torch.uint8, device="cuda")
    """
    direct = session(source, "--cka-memory-device=emulate:cuda:t4,values=off", forked=True)
    direct.assert_outcomes(failed=1)
    assert "OutOfMemoryError" in direct.text
    assert not direct.region["breaches"]
    larger = session(source, "--cka-memory-device=emulate:cuda:a10,values=off", forked=True)
    larger.assert_outcomes(failed=1)
    assert larger.region["breaches"][0]["measured_bytes"] == 15 * 2**30
