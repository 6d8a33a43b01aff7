"""Limits: the exact boundary, the arguments that they accept, and the messages of broken ones."""

import inspect
import math
import re
from collections.abc import Callable

import pytest

from pytest_cka_memory import LimitError, RegionRecord
from pytest_cka_memory.core.markers import MARKERS, Marker
from pytest_cka_memory.core.verdicts import Limit, Tolerance
from pytest_cka_memory.limits import (
    Breach,
    Unjudged,
    default_limits,
    limit_from_marker,
    max_peak_mb,
    max_retained_mb,
)
from pytest_cka_memory.units import MB

MakeRecord = Callable[..., RegionRecord]


@pytest.mark.parametrize("extra", [-1, 0], ids=["one-byte-below", "equal"])
@pytest.mark.parametrize("limit_mb", [0, 1, 1.5, "4 B", "512 KiB"])
def test_a_value_up_to_the_limit_keeps_it(record: MakeRecord, limit_mb: object, extra: int) -> None:
    """Equality keeps a limit: exactly 1 MB is allowed by max_retained_mb(1)."""
    limit = max_retained_mb(limit_mb)
    assert limit.judge(record(retained_bytes=max(0, limit.allowed_bytes + extra))) is None


@pytest.mark.parametrize(
    ("marker", "args", "figures", "message"),
    [
        (
            "max_retained_mb",
            (1,),
            {"retained_bytes": MB + 1},
            "retained 1,048,577 bytes (1.00 MB), allowed 1,048,576 bytes (1.00 MB): "
            "1 byte too much",
        ),
        (
            "zero_retention",
            (),
            {"retained_bytes": 1},
            "retained 1 byte, allowed 0 bytes: 1 byte too much",
        ),
        (
            "max_peak_mb",
            ("4 B",),
            {"start_bytes": 1000, "peak_bytes": 1005},
            "peak increase 5 bytes, allowed 4 bytes: 1 byte too much",
        ),
        (
            "max_level_mb",
            ("1000 B",),
            {"start_bytes": 900, "peak_bytes": 1001},
            "peak 1,001 bytes, allowed 1,000 bytes: 1 byte too much; it was 900 bytes at the "
            "start of the region, which added 101 bytes",
        ),
        (
            "max_reserved_mb",
            (2,),
            {"reserved_start_bytes": MB, "reserved_peak_bytes": 3 * MB + 1},
            "reserve increase 2,097,153 bytes (2.00 MB), allowed 2,097,152 bytes (2.00 MB): "
            "1 byte too much",
        ),
    ],
)
def test_one_byte_above_the_limit_breaks_it(
    record: MakeRecord, marker: str, args: tuple[object, ...], figures: dict[str, int], message: str
) -> None:
    """A value one byte above the limit breaks it; the message gives value, limit and excess."""
    breach = limit_from_marker(marker, args, {}).judge(record(**figures))
    assert isinstance(breach, Breach)
    assert breach.message == message
    assert breach.measured_bytes == breach.allowed_bytes + 1


@pytest.mark.parametrize(
    ("marker", "args", "figures"),
    [
        ("zero_retention", (), {"retained_bytes": 0}),
        ("max_peak_mb", ("4 B",), {"start_bytes": 1000, "peak_bytes": 1004}),
        ("max_level_mb", ("1000 B",), {"start_bytes": 900, "peak_bytes": 1000}),
        ("max_reserved_mb", (2,), {"reserved_start_bytes": MB, "reserved_peak_bytes": 3 * MB}),
        ("max_retained_mb", (0,), {"start_bytes": 9, "end_bytes": 2}),
    ],
)
def test_a_value_equal_to_the_limit_keeps_every_marker(
    record: MakeRecord, marker: str, args: tuple[object, ...], figures: dict[str, int]
) -> None:
    """A value equal to the limit keeps it, for each marker: one byte less than a breach."""
    assert limit_from_marker(marker, args, {}).judge(record(**figures)) is None


def test_max_reserved_mb_is_not_judged_on_a_device_without_a_reserve(record: MakeRecord) -> None:
    """Without a reserve the verdict says that the limit was not judged, instead of kept."""
    verdict = limit_from_marker("max_reserved_mb", (1,), {}).judge(record())
    assert verdict == Unjudged("max_reserved_mb(1)", "this device has no reserve")


@pytest.mark.parametrize(
    ("levels", "kwargs", "measured"),
    [
        pytest.param([4 * i for i in range(9)], {}, 4.0, id="leak"),
        pytest.param([5 * i for i in range(9)], {"tolerance_mb": "4 B"}, 5.0, id="one-byte-above"),
        pytest.param([4 * i for i in range(9)], {"tolerance_mb": "4 B"}, None, id="equal"),
        pytest.param([100 - i for i in range(9)], {}, None, id="shrinking"),
        pytest.param([0, 0, 0, 8, 8], {}, 4.0, id="step-between-the-halves"),
        pytest.param([0, 8, 8, 8, 8], {}, None, id="step-after-the-warm-up"),
        pytest.param([0, 8, 8, 8, 8], {"warmup": 0}, None, id="step-in-an-odd-first-batch"),
    ],
)
def test_growth_above_the_tolerance_breaks_flat_per_batch(
    record: MakeRecord, levels: list[int], kwargs: dict[str, object], measured: float | None
) -> None:
    """With the default tolerance of 0 bytes, any growth breaks ``flat_per_batch``."""
    verdict = limit_from_marker("flat_per_batch", (), kwargs).judge(record(levels=levels))
    if measured is None:
        assert verdict is None
    else:
        assert isinstance(verdict, Breach)
        assert verdict.measured_bytes == measured


def test_growth_message_gives_growth_batches_and_allowed_growth(record: MakeRecord) -> None:
    """The message about growth has the growth per batch, the batches, and what is allowed."""
    breach = limit_from_marker("flat_per_batch", (), {}).judge(
        record(levels=[4 * i for i in range(9)])
    )
    assert isinstance(breach, Breach)
    assert breach.message == "grew by 4 bytes per batch over 9 batches, allowed 0 bytes per batch"


def test_growth_of_a_fraction_of_a_byte_is_not_written_as_zero(record: MakeRecord) -> None:
    """A growth of a fraction of a byte is not written as 0.0 bytes, which would explain nothing."""
    breach = limit_from_marker("flat_per_batch", (), {}).judge(record(levels=[0] * 33 + [1] * 32))
    assert isinstance(breach, Breach)
    assert breach.message.startswith("grew by 0.03 bytes per batch")


def test_a_growth_limit_without_batches_is_broken_and_says_how_to_report_them(
    record: MakeRecord,
) -> None:
    """A limit on growth without batches is not kept; the message says how to report batches."""
    breach = limit_from_marker("flat_per_batch", (), {}).judge(record())
    assert isinstance(breach, Breach)
    assert breach.measured_bytes is None
    assert breach.message == (
        "cannot be judged because no batch was seen: loop over region.batches(loader), "
        "call region.batch_done() after each batch, or write 'with region.each_step():' around "
        "code that trains with an optimizer"
    )


@pytest.mark.parametrize(
    ("count", "warmup", "words"),
    [
        (4, 1, "4 full batches were seen and 5 are needed (1 to warm up, 4 to judge): add 1 more"),
        (1, 0, "1 full batch was seen and 4 are needed (0 to warm up, 4 to judge): add 3 more"),
        (4, 6, "4 full batches were seen and 10 are needed"),
    ],
)
def test_too_few_batches_break_a_growth_limit_and_say_how_many_are_missing(
    record: MakeRecord, count: int, warmup: int, words: str
) -> None:
    """If batches are too few for a limit on growth, the message has those seen, needed, missing."""
    limit = limit_from_marker("flat_per_batch", (), {"warmup": warmup})
    breach = limit.judge(record(levels=[0] * count))
    assert isinstance(breach, Breach)
    assert breach.message.startswith(f"cannot be judged because {words}")


NOT_A_SIZE = [-1, -0.001, math.nan, math.inf, True, None, "2KBanana", "1", "", [1], 1e308]


@pytest.mark.parametrize("value", NOT_A_SIZE, ids=repr)
@pytest.mark.parametrize("marker", ["max_retained_mb", "max_peak_mb", "max_reserved_mb"])
def test_a_limit_that_is_not_a_size_is_refused(marker: str, value: object) -> None:
    """The error for a limit that is not a size repeats the marker and has an example."""
    with pytest.raises(LimitError, match=rf"^{marker}\(.*\): .*memory size.*write") as caught:
        limit_from_marker(marker, (value,), {})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("marker", "args", "kwargs"),
    [
        ("max_retained_mb", (), {}),
        ("max_retained_mb", (1, 2), {}),
        ("max_retained_mb", (1,), {"limit": 2}),
        ("max_retained_mb", (), {"limit_mb": 1}),
        ("max_peak_mb", (), {"mb": 1}),
        ("max_reserved_mb", (1, "MB"), {}),
        ("zero_retention", (0,), {}),
        ("zero_retention", (), {"limit": 0}),
        ("flat_per_batch", (0, 1, 2), {}),
        ("flat_per_batch", (), {"tolerance": 1}),
    ],
)
def test_wrong_arguments_are_refused_with_an_example(
    marker: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """The error for wrong arguments says what is wrong, what was given and what to write."""
    example = MARKERS[marker].example
    with pytest.raises(LimitError, match=rf"^{marker}\(.*\): wrong arguments; write") as caught:
        limit_from_marker(marker, args, kwargs)
    assert str(caught.value).endswith(f"@pytest.mark.{example}")


@pytest.mark.parametrize("warmup", [-1, 1.0, True, "1", None], ids=repr)
def test_a_warmup_that_is_not_a_whole_number_is_refused(warmup: object) -> None:
    """A warm-up of 0 batches is accepted; True and 1.0 are refused."""
    with pytest.raises(
        LimitError, match=r"flat_per_batch\(warmup=.*\): .*write a number of batches"
    ):
        limit_from_marker("flat_per_batch", (), {"warmup": warmup})


@pytest.mark.parametrize("tolerance", [-1, math.nan, "x", True], ids=repr)
def test_a_tolerance_that_is_not_a_size_is_refused(tolerance: object) -> None:
    """A tolerance is checked like any other memory size."""
    with pytest.raises(LimitError, match="memory size"):
        limit_from_marker("flat_per_batch", (tolerance,), {})


@pytest.mark.parametrize(
    ("marker", "args", "kwargs", "text"),
    [
        ("max_retained_mb", (1,), {}, "max_retained_mb(1)"),
        ("max_retained_mb", (), {"limit": "512 KiB"}, "max_retained_mb('512 KiB')"),
        ("max_peak_mb", (0.5,), {}, "max_peak_mb(0.5)"),
        ("zero_retention", (), {}, "zero_retention"),
        ("flat_per_batch", (), {}, "flat_per_batch"),
        ("flat_per_batch", (0.0, 1), {}, "flat_per_batch"),
        ("flat_per_batch", (), {"warmup": 3}, "flat_per_batch(warmup=3)"),
        ("flat_per_batch", ("4 B",), {}, "flat_per_batch(tolerance_mb='4 B')"),
        ("flat_per_batch", (1, 0), {}, "flat_per_batch(tolerance_mb=1, warmup=0)"),
    ],
)
def test_a_limit_is_named_as_users_write_it(
    marker: str, args: tuple[object, ...], kwargs: dict[str, object], text: str
) -> None:
    """A limit has the name that users write, because they search their tests for it."""
    assert limit_from_marker(marker, args, kwargs).text == text


@pytest.mark.parametrize("marker", MARKERS.values(), ids=lambda marker: marker.name)
def test_the_example_of_every_marker_is_valid(marker: Marker) -> None:
    """The example of every marker is valid, because messages tell users to write it."""
    limit = eval(marker.example, {marker.name: marker.build()})
    limit = limit() if callable(limit) else limit
    assert isinstance(limit, (Limit, Tolerance))


@pytest.mark.parametrize("marker", MARKERS.values(), ids=lambda marker: marker.name)
def test_the_builder_of_every_marker_takes_what_its_help_names(marker: Marker) -> None:
    """Each argument that a marker's help has in backquotes is a parameter of its builder."""
    parameters = inspect.signature(marker.build()).parameters
    assert set(re.findall(r"`(\w+)`", marker.help)) == set(parameters)


def test_session_limits_apply_to_tests_without_a_limit_of_their_own() -> None:
    """A marker replaces the option for the same figure; if the figures differ, both apply."""
    both = default_limits([], 2 * MB, 3 * MB)
    assert [(limit.text, limit.allowed_bytes) for limit in both] == [
        ("--cka-memory-max-retained-mb=2", 2 * MB),
        ("--cka-memory-max-peak-mb=3", 3 * MB),
    ]
    own_retained = default_limits([max_retained_mb(9)], 2 * MB, 3 * MB)
    assert [limit.text for limit in own_retained] == ["--cka-memory-max-peak-mb=3"]
    zero = limit_from_marker("zero_retention", (), {})
    assert default_limits([zero, max_peak_mb(1)], 2 * MB, 3 * MB) == []
    flat = limit_from_marker("flat_per_batch", (), {})
    assert len(default_limits([flat], 2 * MB, None)) == 1
    assert default_limits([], None, None) == []


def test_a_session_limit_of_zero_is_a_limit() -> None:
    """A session limit of 0 is a limit, and does not mean that the option is unset."""
    (limit,) = default_limits([], 0, None)
    assert limit.allowed_bytes == 0
