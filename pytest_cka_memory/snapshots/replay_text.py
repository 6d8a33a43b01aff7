"""The outcome of a replay as text and as builtin types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from emulated_cuda.torch_versions import allocator_variable
from pytest_cka_memory.reports import one_line
from pytest_cka_memory.snapshots import unpickling
from pytest_cka_memory.snapshots.analysis import Analysis, Lines
from pytest_cka_memory.snapshots.reading import ALLOC, OUT_OF_MEMORY
from pytest_cka_memory.snapshots.replays import Exactness
from pytest_cka_memory.snapshots.snapshot_text import RECORD
from pytest_cka_memory.snapshots.trials import Trial, Trials
from pytest_cka_memory.units import MB, counted

_DEFAULTS = "torch's defaults"
_LARGE_START = 0.2
"""A share of the reserve: below it, what a recording begins with decides little."""


def lines(trials: Trials, lines_of: Lines, card: str) -> Iterator[str]:
    """Yield the text of a replay.

    Args:
        trials: what was tried.
        lines_of: writes the lines of the program.
        card: the name of the card that was asked for; empty if none was.
    """
    device = trials.device
    name = one_line(trials.snapshot.path.name)
    made = trials.exactness.allocations if trials.exactness else 0
    yield (
        f"{name}, cuda:{device.index}: {counted(made, 'allocation')} replayed by torch "
        f"{_torch()} on an emulated card (no GPU)"
    )
    yield from _exactness(trials)
    yield ""
    if trials.usable_bytes is not None:
        name = "the recording's card" if trials.is_card_recorded else card
        yield (f"fits: whether {name} is enough, with {_mb(trials.usable_bytes)} for a program")
    yield from _table(trials)
    yield ""
    if _ends_refused(trials.device.actions) and any(trial.fits for trial in trials.trials):
        yield (
            "the recording ends after memory was refused, so yes means: enough until then. What "
            "the program needs later is not known; run it with the setting to see, or on a larger "
            "card"
        )
    yield from _advice(trials, lines_of)
    yield from _notes(trials)


def lines_at_refusal(
    name: str, analysis: Analysis, usable_bytes: int | None, card: str
) -> list[str]:
    """Return what the memory that was live when it ended says of settings, without a recording.

    Args:
        name: of the file.
        analysis: what it says.
        usable_bytes: what a program can have of the card that was asked for; None for that of the
            file.
        card: the name of that card.
    """
    moment, refused = analysis.refusals[-1].moment, analysis.refusals[-1].requested_bytes
    if usable_bytes is None:
        usable_bytes, card = moment.reserved_bytes + analysis.refusals[-1].free_bytes, "the card"
    needed = moment.used_bytes + refused
    sizes = f"{_mb(moment.used_bytes)} in use and the {_mb(refused)} that were refused"
    text = [
        f"{one_line(name)}, cuda:{analysis.device.index}: the file lists memory that was live when "
        "an allocation was refused, but no earlier allocations, so there is nothing to replay"
    ]
    if needed > usable_bytes:
        return [
            *text,
            f"no setting is enough: the {sizes} are {_mb(needed)} together, but {card} has "
            f"only {_mb(usable_bytes)} for a program. The program has to allocate less; run python "
            "-m pytest_cka_memory repair with your script or test to try what lowers its peak",
        ]
    if moment.reserved_bytes + refused <= usable_bytes:
        return [
            *text,
            f"{card} is large enough with any setting: {_mb(moment.reserved_bytes)} were reserved "
            f"and {_mb(refused)} were refused, but a program can have {_mb(usable_bytes)}",
        ]
    return [
        *text,
        f"a setting may be enough: the {sizes} are {_mb(needed)} together, and {card} has "
        f"{_mb(usable_bytes)} for a program; {_mb(moment.reserved_bytes - moment.used_bytes)} of "
        "the reserved memory were free, but in pieces",
        "to find the setting, run pytest with --cka-memory-snapshots=FOLDER, or write at the "
        "program's start",
        f"  {RECORD}",
    ]


def data_at_refusal(name: str, analysis: Analysis) -> dict[str, Any]:
    """Return the same as builtin types, sizes in bytes."""
    refusal = analysis.refusals[-1]
    return {
        "file": name,
        "device": analysis.device.index,
        "usable_bytes": refusal.moment.reserved_bytes + refusal.free_bytes,
        "in_use_bytes": refusal.moment.used_bytes,
        "refused_bytes": refusal.requested_bytes,
        "trials": [],
    }


def _ends_refused(actions: bytes) -> bool:
    """Whether nothing was allocated after memory was refused."""
    return OUT_OF_MEMORY in actions and ALLOC not in actions[actions.rindex(OUT_OF_MEMORY) :]


def _torch() -> str:
    try:
        return version("torch").partition("+")[0]
    except PackageNotFoundError:
        return "of an unknown version"


def _exactness(trials: Trials) -> Iterator[str]:
    begin = trials.request_list.beginning
    exact = trials.exactness
    if exact is None:
        yield f"not compared with the recording: {one_line(trials.error)}"
        return
    if not begin.segments:
        start = "the recording begins with nothing reserved"
    else:
        start = (
            f"the recording begins with {_mb(begin.reserved_bytes)} reserved, "
            f"{_mb(begin.used_bytes)} in use"
        )
        if exact.wrong_segments or exact.start_difference_bytes:
            start += (
                f"; the replay starts with slightly different memory ({exact.wrong_segments} of "
                f"{len(begin.segments)} segments differ, the reserve by "
                f"{exact.start_difference_bytes:+,} bytes)"
            )
        else:
            start += "; the replay starts with exactly the same memory"
    yield start
    if exact.differing:
        yield (
            "with the recorded settings, the replayed reserve differs from the recorded one after "
            f"{exact.differing:,} of {counted(exact.allocations, 'allocation')}, by at most "
            f"{exact.largest_bytes:,} bytes; the first difference is at event "
            f"{exact.first_event:,}"
        )
        yield from _cause(trials, exact)
    else:
        yield (
            "with the recorded settings, the replayed reserve equals the recorded one to the "
            f"byte, after each of {counted(exact.allocations, 'allocation')} (with "
            f"{counted(exact.growths, 'growth')} of the reserve)"
        )
    if exact.misplaced_segments:
        yield (
            f"{counted(exact.misplaced_segments, 'segment')} could not get the recorded address, "
            "because other memory was there; the emulated card placed them above all others"
        )
    if begin.lost_blocks:
        yield f"{counted(begin.lost_blocks, 'event')} of the recording contradict each other"


def _cause(trials: Trials, exact: Exactness) -> Iterator[str]:
    """Yield a line on what may make a replay differ from its recording, if something is known."""
    if any(site.flags & unpickling.IN_TORCH_NPU for site in trials.snapshot.sites):
        yield (
            "cause: torch_npu wrote the recording on an Ascend NPU, and has another allocator "
            "than CUDA"
        )
        return
    if exact.wrong_segments or exact.start_difference_bytes:
        return
    if exact.ignored_addresses:
        yield (
            f"likely cause: of free blocks of one size, torch {_torch()} takes the oldest, but "
            "versions before 2.12 take the block at the lowest address"
        )


def _table(trials: Trials) -> Iterator[str]:
    fits = trials.usable_bytes is not None
    head = ["setting", "in use MB", "reserved MB", *(["fits"] if fits else []), "calls"]
    rows = [head]
    for trial in trials.trials:
        run = trial.unlimited
        label = _label(trial, trials.snapshot.settings != {})
        if run.error:
            rows.append([label, one_line(run.error)[:60]])
            continue
        cells = [label, f"{run.allocated_bytes / MB:,.1f}", f"{run.reserved_bytes / MB:,.1f}"]
        cells += [_fits(trial)] if fits else []
        rows.append([*cells, f"{run.device_calls or 0:,}"])
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(len(head))]
    for row in rows:
        first = row[0].ljust(widths[0])
        yield "  ".join([first, *(cell.rjust(widths[at]) for at, cell in enumerate(row) if at)])


def _label(trial: Trial, knows_settings: bool) -> str:
    if not trial.emptied:
        text = trial.settings or _DEFAULTS
        if not trial.is_recorded:
            return text
        return f"as recorded: {text if knows_settings else 'settings unknown'}"
    times = counted(len(trial.emptied), "time")
    return f"as recorded, empty_cache() {times}"


def _fits(trial: Trial) -> str:
    if trial.fits is None:
        return "-"
    if trial.fits:
        return "yes, tight" if trial.is_tight else "yes"
    refused = trial.refused
    return "no" if refused is None else f"no, at event {refused.event:,}"


def _advice(trials: Trials, lines_of: Lines) -> Iterator[str]:
    best = trials.best
    own = trials.trials[0]
    if best is None or own.unlimited.error:
        return
    if best.fits is False:
        needed = min(trial.unlimited.allocated_bytes for trial in trials.trials)
        yield (
            f"no setting is enough: {_mb(needed)} are in use at once, but a program has only "
            f"{_mb(trials.usable_bytes or 0)}. The program has to allocate less; run python -m "
            "pytest_cka_memory snapshot FILE to see which lines have most at the peak, and python "
            "-m pytest_cka_memory repair with your script or test to try what lowers it"
        )
        return
    saved = own.unlimited.reserved_bytes - best.unlimited.reserved_bytes
    if best is own or (saved <= 0 and own.fits is not False):
        yield "no setting that was tried is better than the recording's"
        return
    share = 100 * saved / own.unlimited.reserved_bytes
    yield f"what to write: {_what(best, lines_of, trials)}"
    yield f"this takes {_mb(saved)} ({share:.0f} %) less of the card than the recording's setting"


def _what(trial: Trial, lines_of: Lines, trials: Trials) -> str:
    if not trial.emptied:
        text = trial.settings or '""'
        return f"{allocator_variable()}={text} in the environment, before torch is imported"
    places = [lines_of.text(trials.device.places[event])[0] for event in trial.emptied]
    return "torch.cuda.empty_cache() before " + ", and before ".join(places)


def _notes(trials: Trials) -> Iterator[str]:
    request_list = trials.request_list
    begin = request_list.beginning
    own = trials.trials[0].unlimited
    if begin.reserved_bytes > _LARGE_START * max(1, own.reserved_bytes):
        yield (
            "note: the file does not contain the allocations before the recording began. Every row "
            "starts with the memory that was reserved then; to compare settings for the whole "
            "program, record from its start"
        )
    if request_list.releases:
        times = counted(request_list.releases, "time")
        yield (
            f"note: during the recording, the allocator released its cache {times} because the "
            "card was full; the replays in the table do so only if their own card is full"
        )
    if any(trial.is_tight for trial in trials.trials):
        yield (
            "note: tight means that the allocator has to give memory back to the card to make "
            "room; this takes time"
        )
    if request_list.unclear_releases:
        yield (
            f"note: {request_list.unclear_releases} of these releases may have been calls of "
            "empty_cache(), because the recording has no Python stack for them"
        )
    if any("garbage_collection_threshold" in trial.settings for trial in trials.trials):
        yield (
            "note: garbage_collection_threshold has an effect only in a program that calls "
            "torch.cuda.set_per_process_memory_fraction"
        )
    if own.streams_reused:
        yield (
            "note: the recording has more streams than torch provides, so some of them share one "
            "in the replay"
        )
    yield f"note: {written_by(trials)}"


def written_by(trials: Trials) -> str:
    """Return what the file tells of the torch version that wrote it."""
    if trials.device.names_pools:
        known = "its events name pools, as torch 2.12 and later write them"
    elif not trials.snapshot.settings:
        known = "it has no allocator settings, which torch 2.3 and later write"
    else:
        known = "its events do not name pools, which torch 2.12 and later write"
    return (
        f"the file does not say which torch version wrote it ({known}); torch {_torch()} replayed "
        "it"
    )


def as_data(trials: Trials) -> dict[str, Any]:
    """Return the outcome as builtin types, sizes in bytes."""
    return {
        "file": trials.snapshot.path.name,
        "device": trials.device.index,
        "emulated": True,
        "torch": _torch(),
        "usable_bytes": trials.usable_bytes,
        "start_reserved_bytes": trials.request_list.beginning.reserved_bytes,
        "start_used_bytes": trials.request_list.beginning.used_bytes,
        "exactness": None if trials.exactness is None else asdict(trials.exactness),
        "trials": [_row(trial) for trial in trials.trials],
    }


def _row(trial: Trial) -> dict[str, Any]:
    run = trial.unlimited
    refused = trial.refused
    return {
        "settings": trial.settings,
        "as_recorded": trial.is_recorded and not trial.emptied,
        "emptied_before_events": list(trial.emptied),
        "error": run.error,
        "allocated_bytes": run.allocated_bytes,
        "reserved_bytes": run.reserved_bytes,
        "device_calls": run.device_calls,
        "fits": trial.fits,
        "tight": trial.is_tight,
        "refused": None if refused is None else asdict(refused),
    }


def _mb(size: int) -> str:
    return f"{size / MB:,.1f} MB"
