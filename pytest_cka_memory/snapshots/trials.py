"""Try what would have prevented an out-of-memory error, or lowered the reserve, of a recording.

The recorded requests are replayed under other settings of the allocator, and with its cache emptied
at some point. Which settings are tried if none is named: `ALTERNATIVES` in :mod:`.reading`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from emulated_cuda.cards import CONTEXT_BYTES
from pytest_cka_memory.snapshots import replays
from pytest_cka_memory.snapshots.reading import (
    ALTERNATIVES,
    OUT_OF_MEMORY,
    Device,
    Snapshot,
    recorded_settings,
)
from pytest_cka_memory.snapshots.replays import Exactness, Refused, Replayed, Run
from pytest_cka_memory.snapshots.request_list import Requests, recorded_reserve, requests_of

_Tried = tuple[str, tuple[int, ...], Replayed]
"""Settings, the requests before which the cache is emptied, and what the run took."""
_MOST_EMPTIED = 3
"""A program would hardly empty its cache at more moments than these."""
_LEAST_GAIN = 0.01
"""A share of the reserve: less is not worth a line in a program."""


@dataclass(frozen=True)
class Trial:
    """The recording under one setting."""

    settings: str
    """Text of ``PYTORCH_ALLOC_CONF``."""
    is_recorded: bool
    """Whether the recording was made with these settings."""
    emptied: tuple[int, ...]
    """Events before which the cache is emptied."""
    unlimited: Replayed
    """On a card with more memory than the program can take."""
    on_card: Replayed | None
    """On the card that was asked for, if it is known from neither figure whether it fits."""
    usable_bytes: int | None
    """What that card has for a program; None if no card is named or known."""

    @property
    def fits(self) -> bool | None:
        """Whether the card has enough memory; None without a card."""
        if self.usable_bytes is None or self.unlimited.error:
            return None
        if self.on_card is not None:
            return self.on_card.refused is None and not self.on_card.error
        return self.unlimited.reserved_bytes <= self.usable_bytes

    @property
    def refused(self) -> Refused | None:
        """The allocation for which the card has no memory."""
        return None if self.on_card is None else self.on_card.refused

    @property
    def is_tight(self) -> bool:
        """Whether the allocator has to give memory back to the card to make room for more."""
        if self.on_card is None or not self.fits:
            return False
        return self.on_card.device_frees > self.unlimited.device_frees


@dataclass
class Trials:
    """All that was tried for one device of a recording."""

    snapshot: Snapshot
    device: Device
    request_list: Requests
    exactness: Exactness | None
    """How the replay differs from the recording under its own settings; None if it could not."""
    error: str
    """Why there is no comparison."""
    usable_bytes: int | None
    is_card_recorded: bool
    """Whether the memory of the card is that of the recording, which ran out of memory."""
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        """The setting to write: one that fits, and then the one with the lowest reserve."""
        known = [trial for trial in self.trials if not trial.unlimited.error]
        if not known:
            return None
        return min(known, key=_preference)


def _preference(trial: Trial) -> tuple[bool, bool, int, int, bool]:
    fits = trial.fits is not False
    reserved = trial.unlimited.reserved_bytes
    emptied = len(trial.emptied)
    # Of several that are equal, the recorded one: it needs no change.
    return (not fits, trial.is_tight, reserved, emptied, not trial.is_recorded)


def tried(
    snapshot: Snapshot,
    device: Device,
    settings: Sequence[str] = ALTERNATIVES,
    usable_bytes: int | None = None,
) -> Trials:
    """Replay a recording under its own settings and others.

    Args:
        snapshot: the file.
        device: one of its devices.
        settings: texts of ``PYTORCH_ALLOC_CONF`` to try.
        usable_bytes: the memory of a card that a program can have; None for that of the
            recording's card, if an allocation was refused there.

    Raises:
        ReportError: if no card can be emulated here.
    """
    request_list = requests_of(snapshot, device)
    own = recorded_settings(snapshot.settings)
    texts = list(dict.fromkeys([own, *settings]))
    # Under other settings the card would have been asked for other memory, in another order.
    runs_of_texts = [Run(text, positioned=text == own) for text in texts]
    # Without attempts and with releases, the first does what the recording's card did.
    as_it_was, *unlimited = replays.run(request_list, [Run(own, False, True, True), *runs_of_texts])
    error = as_it_was.error or (
        "" if as_it_was.refused is None else ("the recording fills an emulated card")
    )
    exactness = None if error else replays.exactness(request_list, device, as_it_was)
    aged = exactness and replays.in_order_of_ages(request_list, device, own, exactness)
    if aged:
        as_it_was, unlimited[0] = aged
        exactness = replays.exactness(request_list, device, as_it_was)
    in_place = Run(own, positioned=not aged)
    of_recording = None
    if usable_bytes is None:
        usable_bytes = of_recording = recorded_usable(device, request_list)
    trials = Trials(
        snapshot, device, request_list, exactness, error, usable_bytes, of_recording is not None
    )
    emptied = _emptied(request_list, in_place, unlimited[0])
    runs: list[_Tried] = [
        (text, (), replayed) for text, replayed in zip(texts, unlimited, strict=True)
    ]
    if emptied is not None:
        runs.insert(1, (own, emptied[0], emptied[1]))
    on_card = _on_card(request_list, runs, in_place, usable_bytes)
    for number, (text, moments, replayed) in enumerate(runs):
        trials.trials.append(
            Trial(
                text,
                text == own,
                tuple(request_list.of_event[moment] for moment in moments),
                replayed,
                on_card.get(number),
                usable_bytes,
            )
        )
    return trials


def recorded_usable(device: Device, request_list: Requests) -> int | None:
    """Return what the recording's card had for the program, if an allocation was refused there.

    Args:
        device: what was recorded.
        request_list: the same as requests.
    """
    reserved = request_list.beginning.reserved_bytes
    levels = dict(recorded_reserve(device, reserved))
    usable = None
    for number, action in enumerate(device.actions):
        reserved = levels.get(number, reserved)
        if action == OUT_OF_MEMORY:
            # The address of this event is how much the card had free.
            usable = reserved + device.addresses[number]
    return usable


def _emptied(
    request_list: Requests, own: Run, replayed: Replayed
) -> tuple[tuple[int, ...], Replayed] | None:
    """Return moments to empty the cache that lower the reserve, and the replay with them.

    Each is before the allocation by which the reserve becomes highest.
    """
    if replayed.error or replayed.allocated_bytes > replayed.reserved_bytes * (1 - _LEAST_GAIN):
        return None
    best: tuple[tuple[int, ...], Replayed] | None = None
    current = replayed
    moments: tuple[int, ...] = ()
    while len(moments) < _MOST_EMPTIED and not current.error:
        at = _highest(current, request_list.first)
        # To empty the cache a second time before the same request frees nothing.
        if at is None or at in moments:
            break
        moments = tuple(sorted({*moments, at}))
        (current,) = replays.run(request_list, [own._replace(emptied=moments)])
        before = replayed if best is None else best[1]
        if current.error or current.reserved_bytes > before.reserved_bytes * (1 - _LEAST_GAIN):
            break
        best = (moments, current)
    return best


def _highest(replayed: Replayed, first: int) -> int | None:
    """Return the request by which the reserve becomes highest; None if it never grows."""
    assert replayed.at is not None
    assert replayed.levels is not None
    rows = [
        (level, -number)
        for number, level in zip(replayed.at, replayed.levels, strict=True)
        if number >= first
    ]
    return -max(rows)[1] if rows else None


def _on_card(
    request_list: Requests,
    runs: Sequence[_Tried],
    own: Run,
    usable_bytes: int | None,
) -> dict[int, Replayed]:
    """Return number of a run -> its replay on the card, where its figures do not decide."""
    if usable_bytes is None:
        return {}
    total = usable_bytes + CONTEXT_BYTES
    # What fits without a limit fits the card: it is asked for the same memory.
    numbers = [
        number
        for number, (_, _, replayed) in enumerate(runs)
        if not replayed.error and replayed.reserved_bytes > usable_bytes
    ]
    wanted = [
        (own if text == own.settings else Run(text))._replace(emptied=moments)
        for text, moments, _ in (runs[number] for number in numbers)
    ]
    return dict(zip(numbers, replays.run(request_list, wanted, total_bytes=total), strict=True))
