"""Fingerprints of devices, judging against a baseline, and updating a baseline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import pytest
from reports_made import CPU, GPU

from pytest_cka_memory import LimitError, RegionRecord
from pytest_cka_memory.core import conditions
from pytest_cka_memory.core.conditions import Changed, Fingerprint, fingerprint_of
from pytest_cka_memory.core.figures import rounded_figures
from pytest_cka_memory.core.verdicts import Result, judge, parse_tolerance
from pytest_cka_memory.limits import Breach, Unjudged, limit_from_marker
from pytest_cka_memory.stored.baselines import BaselineKey, WithinBaseline, tolerance_of_marker
from pytest_cka_memory.stored.update import BaselineChange, Update, updated

MakeRecord = Callable[..., RegionRecord]
ZEROS = {
    "peak_increase_bytes": 0,
    "retained_bytes": 0,
    "growth_bytes_per_batch": None,
    "reserved_increase_bytes": None,
}
FACTS = {
    "device": "cuda:1",
    "device_name": "NVIDIA H200",
    "meter": "allocator",
    "torch": "2.15.0+cu132",
    "cuda": "13.2.1",
}


def limit(tolerance: str = "5%", required: bool = False, **figures: int | None) -> WithinBaseline:
    """A limit with a baseline for one region; figures that are not given are 0."""
    known = {"": {**ZEROS, **figures}}
    return WithinBaseline("memory_baseline", parse_tolerance(tolerance), known, required=required)


def on_cpu(results: Sequence[Result]) -> list[tuple[BaselineKey, Result]]:
    """Results with the keys of their lines."""
    return [(BaselineKey(it.nodeid, it.record.label, CPU), it) for it in results]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"device": "cuda:0"}, True),
        ({"torch": "2.15.1+cu130"}, True),
        ({"cuda": "13.2"}, True),
        ({"python": "3.14"}, True),
        ({"device_name": "NVIDIA A100"}, False),
        ({"meter": "allocator, whole blocks only"}, False),
        ({"torch": "2.16.0"}, False),
        ({"torch": "3.15.0"}, False),
        ({"cuda": "13.3"}, False),
        ({"cuda": None}, False),
    ],
    ids=str,
)
def test_fingerprint_has_only_what_changes_memory_figures(
    change: dict[str, str], same: bool
) -> None:
    """A fingerprint has the model, the meter and the minor versions of torch and CUDA only.

    It has neither the device index nor patch releases nor the Python version.
    """
    assert (fingerprint_of({**FACTS, **change}) == fingerprint_of(FACTS)) is same


def test_all_cpus_have_the_same_fingerprint() -> None:
    """All CPUs have one fingerprint: storages have equal sizes, and
    a CI service's machines differ.
    """
    cpu = {**FACTS, "device": "cpu", "cuda": None}
    other = {**cpu, "device_name": "AMD EPYC"}
    assert fingerprint_of(cpu) == fingerprint_of(other) == Fingerprint("cpu", "allocator", "2.15")


def test_fingerprint_does_not_depend_on_whether_torch_was_imported() -> None:
    """Before torch is imported, the fingerprint has the version of the installed torch."""
    installed = {**FACTS, "torch": version("torch")}
    assert fingerprint_of({**FACTS, "torch": None}) == fingerprint_of(installed)


def test_torch_without_metadata_has_no_version_in_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch in its source folder has no metadata, so the fingerprint has no version."""

    def no_metadata(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(conditions, "version", no_metadata)
    installed = conditions.installed_torch.__wrapped__
    monkeypatch.setattr(conditions, "installed_torch", installed)
    assert fingerprint_of({**FACTS, "torch": None}).torch is None


def test_fingerprint_is_shown_as_readable_text() -> None:
    """A fingerprint is shown as text if the baseline for this device is missing."""
    assert str(GPU) == "NVIDIA H200, allocator, torch 2.15, CUDA 13.2"


@pytest.mark.parametrize(("levels", "growth"), [([0, 0, 0, 1, 2], 1), ([9, 9, 9, 0, 0], 0)])
def test_growth_is_stored_in_whole_bytes(
    record: MakeRecord, levels: list[int], growth: int
) -> None:
    """Growth is stored rounded up, so the same run passes again; a decrease is stored as 0."""
    assert rounded_figures(record(levels=levels))["growth_bytes_per_batch"] == growth


@pytest.mark.parametrize("extra", [-1, 0, 1], ids=["one-byte-below", "equal", "one-byte-above"])
@pytest.mark.parametrize(
    ("figure", "figures"),
    [
        ("peak_increase_bytes", {"peak_bytes": 1050}),
        ("retained_bytes", {"retained_bytes": 1050}),
        ("reserved_increase_bytes", {"reserved_start_bytes": 0, "reserved_peak_bytes": 1050}),
    ],
)
def test_tolerance_is_exact_to_the_byte(
    record: MakeRecord, figure: str, figures: dict[str, int], extra: int
) -> None:
    """A tolerance is exact to the byte: 5% of 1000 is 50, so 1050 passes and 1051 fails."""
    name = list(figures)[-1]
    measured = record(**{**figures, name: figures[name] + extra})
    breaches = limit(**{figure: 1000}).verdicts(measured)
    assert len(breaches) == (extra > 0)


@pytest.mark.parametrize(("rise", "broken"), [(4, False), (5, True)])
def test_growth_is_judged_against_the_baseline(record: MakeRecord, rise: int, broken: bool) -> None:
    """Growth is judged against a baseline of growth, both in bytes per batch."""
    levels = [rise * number for number in range(9)]
    found = limit(growth_bytes_per_batch=4).verdicts(record(levels=levels, peak_bytes=0))
    assert bool(found) is broken


def test_breach_message_has_baseline_measurement_and_tolerance(record: MakeRecord) -> None:
    """The message of a broken baseline is one sentence, in bytes if a few bytes decide."""
    breach = limit(peak_increase_bytes=1000).judge(record(peak_bytes=1060))
    assert breach == Breach(
        "memory_baseline",
        1050,
        1060,
        "peak increase 1,060 bytes, allowed 1,050 bytes (5% above the baseline's 1,000 bytes): "
        "10 bytes too much",
        "peak_increase_bytes",
    )


def test_each_figure_above_its_baseline_is_a_breach(record: MakeRecord) -> None:
    """Every figure above its baseline is reported, because each has its own holders."""
    result = judge("t", record(peak_bytes=9, retained_bytes=9), [limit()])
    assert [b.figure for b in result.breaches] == ["peak_increase_bytes", "retained_bytes"]
    assert result.verdict == "BREACH"


def test_unknown_growth_is_a_breach_if_the_baseline_has_growth(record: MakeRecord) -> None:
    """If the baseline has growth, a loop with too few batches to measure it must not pass."""
    breach = limit(growth_bytes_per_batch=0).judge(record(levels=[1, 1]))
    assert isinstance(breach, Breach)
    assert breach.measured_bytes is None
    assert breach.message.startswith(
        "cannot be judged: growth per batch is 0 bytes in the baseline, but it is not known now; "
        "run at least 5"
    )


def test_growth_is_not_judged_if_the_baseline_has_no_growth(record: MakeRecord) -> None:
    """A baseline without growth has nothing to compare growth with, so growth is not judged."""
    assert limit().judge(record(levels=[0, 1, 2, 3, 4, 5, 6], peak_bytes=0)) is None


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (None, "no baseline for this region; write one with --cka-memory-update-baseline"),
        (
            CPU,
            "no baseline for this device (cpu, exact, torch 2.15); "
            "write one with --cka-memory-update-baseline",
        ),
    ],
    ids=["region", "device"],
)
def test_region_without_a_baseline_is_not_judged(
    record: MakeRecord, device: Fingerprint | None, reason: str
) -> None:
    """Without a baseline a region is not judged, and the reason says how to write one.

    It is a breach if a baseline is required.
    """
    unknown = replace(limit(), known={}, device=device)
    result = judge("t", record(), [unknown])
    assert result.unjudged == (Unjudged("memory_baseline", reason),)
    assert result.verdict == "not judged"
    breach = replace(unknown, required=True).judge(record())
    assert isinstance(breach, Breach)
    assert breach.measured_bytes is None
    assert reason in breach.message


def test_region_without_a_required_baseline_says_why_and_allows_nothing(record: MakeRecord) -> None:
    """The breach names the option that requires it, and has no allowance."""
    breach = replace(limit(required=True), known={}).judge(record())
    assert isinstance(breach, Breach)
    assert (breach.allowed_bytes, breach.measured_bytes) == (0, None)
    assert breach.message == (
        "no baseline for this region; write one with --cka-memory-update-baseline. "
        "This fails because --cka-memory-require-baseline is given"
    )


def test_limit_of_a_baseline_requires_no_entry_and_names_no_device_by_default(
    record: MakeRecord,
) -> None:
    """A limit without further arguments leaves a region without an entry not judged."""
    verdict = WithinBaseline("memory_baseline", parse_tolerance("5%"), {}).judge(record())
    assert isinstance(verdict, Unjudged)
    assert verdict.reason.startswith("no baseline for this region;")


CHANGED = (Changed("threads", "1", "2"), Changed("allocator", "default", "X=1"))


def test_figure_that_depends_on_a_changed_fact_is_judged_without_scratch_memory(
    record: MakeRecord,
) -> None:
    """The peak is left out with the fact and both values; what is the same everywhere is judged."""
    old = limit(peak_increase_bytes=100, increase_without_scratch_bytes=50, retained_bytes=5)
    here = replace(old, changed={"": CHANGED[:1]})
    higher = {"peak_bytes": 500, "retained_bytes": 5, "peak_without_scratch_bytes": 50}
    assert old.verdicts(record(**higher)) != here.verdicts(record(**higher))
    (unjudged,) = here.verdicts(record(**higher))
    assert unjudged == Unjudged(
        "memory_baseline: peak increase",
        "threads 1 -> 2; judged without scratch memory of operators; record it for this machine "
        "with --cka-memory-update-baseline",
    )
    breach, _ = here.verdicts(record(**{**higher, "peak_without_scratch_bytes": 53}))
    assert isinstance(breach, Breach)
    assert breach.figure == "increase_without_scratch_bytes"
    leak, _ = here.verdicts(record(**{**higher, "retained_bytes": 6}))
    assert isinstance(leak, Breach)
    assert leak.figure == "retained_bytes"


def test_figures_without_a_substitute_are_left_out(record: MakeRecord) -> None:
    """A line of an older version has no peak without scratch memory, nor has a line of a GPU."""
    here = replace(limit(peak_increase_bytes=100, reserved_increase_bytes=7), changed={"": CHANGED})
    (unjudged,) = here.verdicts(record(peak_bytes=500, peak_without_scratch_bytes=400))
    assert isinstance(unjudged, Unjudged)
    assert unjudged.limit == "memory_baseline: peak increase, reserve increase"
    assert unjudged.reason.startswith("threads 1 -> 2, allocator settings default -> X=1; record")


def test_figure_in_place_of_another_is_not_judged_beside_it(record: MakeRecord) -> None:
    """One cause gives one breach."""
    old = limit(peak_increase_bytes=100, increase_without_scratch_bytes=50)
    (breach,) = old.verdicts(record(peak_bytes=500, peak_without_scratch_bytes=500))
    assert isinstance(breach, Breach)
    assert breach.figure == "peak_increase_bytes"


def test_other_test_is_named_by_a_text() -> None:
    """``relative_to`` takes the id of a parameter and refuses anything else."""
    assert tolerance_of_marker(relative_to="eager") is None
    assert tolerance_of_marker("9%", relative_to="eager") == parse_tolerance("9%")
    with pytest.raises(
        LimitError, match=r"^relative_to=3 is not the id of a pytest parameter; write an id"
    ):
        tolerance_of_marker(relative_to=3)


def test_marker_tolerance_replaces_the_default() -> None:
    """The marker's tolerance, by position or keyword, replaces the default; it may be missing."""
    assert limit_from_marker("memory_baseline", (), {}) is None
    assert limit_from_marker("memory_baseline", ("1 MB",), {}) == parse_tolerance("1 MB")
    given = limit_from_marker("memory_baseline", (), {"tolerance": "9%"})
    assert given == parse_tolerance("9%")


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((None,), {}, r"memory_baseline\(None\): cannot read None as a tolerance; write '5%'"),
        ((5,), {}, r"memory_baseline\(5\): cannot read 5 as a tolerance; write '5%', '64 KiB' or"),
        (("5",), {}, r"memory_baseline\('5'\): cannot read '5' as a tolerance"),
        (("5%", "5%"), {}, r"memory_baseline\('5%', '5%'\): wrong arguments; write e\.g\. @pytest"),
        ((), {"slack": "5%"}, r"memory_baseline\(slack='5%'\): wrong arguments"),
        (("5%",), {"tolerance": "5%"}, r"memory_baseline\('5%', tolerance='5%'\): wrong arguments"),
    ],
)
def test_wrong_marker_arguments_are_refused(
    args: tuple[object, ...], kwargs: Mapping[str, object], message: str
) -> None:
    """The error for wrong arguments quotes the marker, what is wrong and what to write instead."""
    with pytest.raises(LimitError, match=message):
        limit_from_marker("memory_baseline", args, kwargs)


def test_update_adds_regions_that_passed(record: MakeRecord) -> None:
    """An update counts added, changed and unchanged regions; other entries stay the same."""
    old = {
        BaselineKey("same", "", CPU): ZEROS,
        BaselineKey("moved", "", CPU): ZEROS,
        BaselineKey("moved", "", GPU): ZEROS,
        BaselineKey("failed", "", CPU): ZEROS,
        BaselineKey("not run", "", CPU): ZEROS,
    }
    results = [
        Result("same", record()),
        Result("moved", record(retained_bytes=5)),
        Result("failed", record(retained_bytes=5), outcome="failed"),
        Result("new", record(label="a")),
        Result("left by an exception", record(completed=False)),
    ]
    update = updated(old, on_cpu(results))
    assert update == Update(
        {
            **old,
            BaselineKey("moved", "", CPU): {**ZEROS, "retained_bytes": 5},
            BaselineKey("new", "a", CPU): ZEROS,
        },
        added=1,
        changed=1,
        unchanged=1,
        changes=(BaselineChange(BaselineKey("moved", "", CPU), "retained_bytes", 0, 5),),
    )


def test_update_drops_regions_that_a_test_no_longer_opens(record: MakeRecord) -> None:
    """An update drops regions that are gone, but not of other devices or after an exception."""
    old = {
        BaselineKey("t", "gone", CPU): ZEROS,
        BaselineKey("t", "gone", GPU): ZEROS,
        BaselineKey("t", "early", CPU): ZEROS,
        BaselineKey("other", "gone", CPU): ZEROS,
    }
    results = [Result("t", record()), Result("t", record(label="early", completed=False))]
    update = updated(old, on_cpu(results))
    assert update.entries.keys() == {*old, BaselineKey("t", "", CPU)} - {
        BaselineKey("t", "gone", CPU)
    }
    assert update.dropped == 1


def test_update_takes_the_highest_figures_of_a_region_measured_twice(record: MakeRecord) -> None:
    """If workers measured one region each (--dist=each), a baseline
    has the maximum of each figure.
    """
    flat = [0] * 5
    results = [
        Result("t", record(retained_bytes=5, levels=flat)),
        Result("t", record(peak_bytes=7)),
    ]
    (figures,) = updated({}, on_cpu(results)).entries.values()
    assert figures == {
        "peak_increase_bytes": 7,
        "retained_bytes": 5,
        "growth_bytes_per_batch": 0,
        "reserved_increase_bytes": None,
    }


ONE, TWO = (("threads", "1"),), (("threads", "2"),)


def test_update_on_another_machine_adds_a_line(record: MakeRecord) -> None:
    """The line of the first machine stays if both agree in what is the same on every machine."""
    old = {BaselineKey("t", "", CPU, ONE): {**ZEROS, "peak_increase_bytes": 9}}
    update = updated(old, [(BaselineKey("t", "", CPU, TWO), Result("t", record()))])
    assert update.entries == {**old, BaselineKey("t", "", CPU, TWO): ZEROS}
    assert (update.added, update.dropped) == (1, 0)


def test_update_drops_the_line_of_another_machine_if_the_code_has_changed(
    record: MakeRecord,
) -> None:
    """What does not depend on the machine differs, so the other line is of other code."""
    old = {BaselineKey("t", "", CPU, ONE): ZEROS}
    update = updated(old, [(BaselineKey("t", "", CPU, TWO), Result("t", record(retained_bytes=3)))])
    assert list(update.entries) == [BaselineKey("t", "", CPU, TWO)]
    assert (update.added, update.dropped) == (1, 1)


def test_update_gives_a_line_of_an_older_version_its_conditions(record: MakeRecord) -> None:
    """It stays one line, so that nothing is judged by figures of an unknown machine."""
    old = {BaselineKey("t", "", CPU): ZEROS}
    update = updated(old, [(BaselineKey("t", "", CPU, TWO), Result("t", record()))])
    assert update.entries == {BaselineKey("t", "", CPU, TWO): ZEROS}
    assert (update.added, update.unchanged, update.dropped) == (0, 1, 0)
