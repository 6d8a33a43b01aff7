"""Records are judged against limits, and results are passed between processes."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from pytest_cka_memory import RegionRecord
from pytest_cka_memory.core.decoder import ShapeError
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.core.verdicts import Result, judge
from pytest_cka_memory.limits import Limit, limit_from_marker, max_peak_mb, max_retained_mb

MakeRecord = Callable[..., RegionRecord]
ZERO = limit_from_marker("zero_retention", (), {})
RESERVED = limit_from_marker("max_reserved_mb", (1,), {})
FLAT = limit_from_marker("flat_per_batch", (), {})
WARNS = limit_from_marker("max_peak_mb", (1,), {"warn": True})


@pytest.mark.parametrize(
    ("limits", "figures", "verdict"),
    [
        pytest.param([], {"retained_bytes": 9}, "no limit", id="no-limit"),
        pytest.param([ZERO], {}, "ok", id="kept"),
        pytest.param([ZERO], {"retained_bytes": 1}, "BREACH", id="broken"),
        pytest.param([ZERO, FLAT], {}, "BREACH", id="one-kept-one-impossible"),
        pytest.param([RESERVED], {}, "not judged", id="only-limit-not-judged"),
        pytest.param([RESERVED, ZERO], {}, "ok", id="one-not-judged"),
        pytest.param([RESERVED, ZERO], {"retained_bytes": 1}, "BREACH", id="the-other-broken"),
        pytest.param([ZERO], {"retained_bytes": 1, "completed": False}, "not judged", id="raised"),
        pytest.param([], {"completed": False}, "not judged", id="raised-without-limit"),
    ],
)
def test_result_has_one_verdict(
    record: MakeRecord, limits: list[Limit], figures: dict[str, object], verdict: str
) -> None:
    """A region that an exception aborted neither passes nor breaks a limit."""
    assert judge("test_x.py::test", record(**figures), limits).verdict == verdict


def test_note_about_the_host_leaves_the_verdict(record: MakeRecord) -> None:
    """A note about the host, or two, does not change the verdict on the accelerator."""
    left = Holding(bytes=128, count=16, batches=16)
    levels = [0] * 9
    result = judge("n", record(levels=levels, host_retained=(left,)), [FLAT, RESERVED])
    assert [found.limit for found in result.unjudged] == [
        "flat_per_batch on the host",
        "max_reserved_mb(1)",
    ]
    assert result.verdict == "ok"


@pytest.mark.parametrize("batches", [None, 1], ids=["no-loop", "one-batch"])
def test_what_one_batch_has_left_on_the_host_is_not_noted(
    record: MakeRecord, batches: int | None
) -> None:
    """What one batch left on the host, such as an optimizer's step counts, is not noted."""
    left = Holding(bytes=64, count=16, batches=batches)
    assert judge("n", record(levels=[0] * 9, host_retained=(left,)), [FLAT]).unjudged == ()


def test_note_about_the_host_counts_all_storages_of_the_line(record: MakeRecord) -> None:
    """A note about the host counts all storages of a line, also those held in another way."""
    line = {"created_at": ("m.py:15 in update",), "code": "value * n"}
    groups = (
        Holding(bytes=900, count=1, batches=1, created_at=("m.py:1 in f",)),
        Holding(bytes=112, count=14, batches=14, held_by="meter.sum", hint="keep item()", **line),
        Holding(bytes=16, count=2, batches=1, **line),
    )
    (note,) = judge("n", record(levels=[0] * 9, host_retained=groups), [FLAT]).unjudged
    assert note.reason == (
        "16 tensors, 128 bytes, allocated in several batches, are retained and not judged: "
        "made at m.py:15 in update: `value * n`, held by meter.sum; what to do: keep item()"
    )


def test_result_has_all_breaches(record: MakeRecord) -> None:
    """A result has all breaches, because the second one would show
    only after the first's repair.
    """
    limits = [max_retained_mb("4 B"), max_peak_mb("8 B"), ZERO]
    result = judge("n", record(retained_bytes=5, peak_bytes=9), limits)
    assert [breach.limit for breach in result.breaches] == [limit.text for limit in limits]
    assert result.limits == tuple(limit.text for limit in limits)


@pytest.mark.parametrize(
    ("limits", "outcome", "verdict"),
    [
        ([WARNS], "passed", "warning"),
        ([WARNS, ZERO], "passed", "BREACH"),
        ([ZERO, WARNS], "passed", "BREACH"),
        ([ZERO], "xfailed", "known (xfail)"),
        ([WARNS], "xfailed", "warning"),
        ([ZERO], "failed", "BREACH"),
    ],
)
def test_verdict_on_broken_limits_is_that_of_the_most_serious(
    record: MakeRecord, limits: list[Limit], outcome: str, verdict: str
) -> None:
    """A warning counts only without other broken limits, which are known in a test with xfail."""
    result = judge("n", record(retained_bytes=1, peak_bytes=2**21), limits)
    assert replace(result, outcome=outcome).verdict == verdict
    assert [breach.warns for breach in result.breaches] == [limit is WARNS for limit in limits]


def test_limit_is_of_a_region_and_fails_its_test_by_default() -> None:
    """Unless a limit says otherwise, it is judged per region and needs no further measurement."""

    class Anything(Limit):
        def judge(self, record: RegionRecord) -> None:
            """Accept every region."""

    limit = Anything("anything")
    assert (limit.warns, limit.scope, limit.addition, limit.reports_host) == (
        False,
        "function",
        "",
        False,
    )


def test_region_is_of_a_passed_test_in_the_main_process_by_default(record: MakeRecord) -> None:
    """A result has the outcome and the process of a session without workers."""
    result = judge("a.py::t", record(), [])
    assert (result.outcome, result.worker, result.rank) == ("passed", "main", "")


@pytest.mark.parametrize(
    ("worker", "name"), [("rank 1", "a.py::t fit rank 1"), ("gw0", "a.py::t fit")]
)
def test_name_has_the_rank_but_no_worker(record: MakeRecord, worker: str, name: str) -> None:
    """Ranks run the same tests, so that their regions differ by the rank; workers run others."""
    result = replace(judge("a.py::t", record(label="fit"), []), worker=worker)
    assert result.name == name
    assert result.rank == ("rank 1" if worker == "rank 1" else "")


def test_fields_of_other_plugins_are_written_only_if_there_are_some(record: MakeRecord) -> None:
    """The key ``extra`` is in the dictionary of a region to which a plugin has added fields."""
    plain = judge("a.py::t", record(), [])
    assert "extra" not in plain.to_dict()
    added = replace(plain, extra={"loss": 0.5})
    assert added.to_dict()["extra"] == {"loss": 0.5}
    assert Result.from_dict(added.to_dict()) == added


@pytest.mark.parametrize("name", ["nodeid", "peak_bytes"])
@pytest.mark.parametrize(("where", "path"), [((), ""), (("regions[3]",), r"regions\[3\]\.")])
def test_missing_key_of_a_result_is_named_by_its_path(
    record: MakeRecord, name: str, where: tuple[str, ...], path: str
) -> None:
    """Figures lie beside the other keys of a result, and a path in an error has them there."""
    data = judge("a.py::t", record(), []).to_dict()
    del data[name]
    with pytest.raises(ShapeError, match=f"^{path}{name} is missing; expected a value$"):
        Result.from_dict(data, *where)


def test_name_has_the_test_and_the_label(record: MakeRecord) -> None:
    """A result is named by test and label; without a label the name has no trailing space."""
    assert judge("a.py::t", record(label="fit"), []).name == "a.py::t fit"
    assert judge("a.py::t", record(), []).name == "a.py::t"


@pytest.mark.parametrize("limits", [[], [ZERO, RESERVED, FLAT]], ids=["free", "limited"])
def test_result_is_restored_from_json(record: MakeRecord, limits: list[Limit]) -> None:
    """Test reports carry results to the xdist controller as
    builtin types, and they are restored.
    """
    levels = [4 * i for i in range(9)]
    made = judge("a.py::t", record(label="fit", retained_bytes=1, levels=levels), limits)
    assert Result.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@pytest.mark.parametrize("limits", [[], [ZERO, RESERVED, FLAT]], ids=["free", "limited"])
@pytest.mark.parametrize("levels", [(), [4 * i for i in range(9)]], ids=["whole", "batches"])
@pytest.mark.parametrize("extra", [{}, {"loss": 0.5}], ids=["own", "of-plugins"])
def test_result_is_restored_from_what_a_report_carries(
    record: MakeRecord, limits: list[Limit], levels: list[int], extra: dict[str, float]
) -> None:
    """What has figures alone is rebuilt without checks, and is equal to what checks build."""
    figures = record(label="fit", retained_bytes=1, garbage_left=True, levels=levels)
    made = replace(judge("a.py::t", figures, limits), extra=extra, outcome="failed", worker="gw0")
    carried = json.loads(json.dumps({**made.filled(), "worker": "gw0"}))
    before = dict(carried)
    assert Result.from_filled(carried) == Result.from_dict(carried) == made
    assert carried == before


@pytest.mark.parametrize("figure", [-1, 2**63, 0.5, None, [1]])
def test_what_a_report_carries_is_refused_as_what_a_file_has(
    record: MakeRecord, figure: object
) -> None:
    """A figure of another plugin's meter that no figure can be is named."""
    carried = {**judge("a.py::t", record(), []).filled(), "worker": "main", "peak_bytes": figure}
    with pytest.raises(ShapeError, match=r"^peak_bytes is .*expected "):
        Result.from_filled(carried)


def test_dictionary_has_the_published_keys(record: MakeRecord) -> None:
    """A result's dictionary has the keys of the schema pytest-cka-memory/1."""
    plain = judge("a.py::t", record(label="fit"), [ZERO]).to_dict()
    assert list(plain)[:5] == ["nodeid", "label", "worker", "outcome", "verdict"]
    assert {"limits", "breaches", "unjudged", "timeline", "growth_bytes_per_batch"} < set(plain)
    broken = judge("a.py::t", record(retained_bytes=1), [ZERO]).to_dict()
    assert broken["breaches"] == [
        {
            "limit": "zero_retention",
            "allowed_bytes": 0,
            "measured_bytes": 1,
            "message": "retained 1 byte, allowed 0 bytes: 1 byte too much",
            "figure": "retained_bytes",
            "warns": False,
            "warmup": None,
        }
    ]
