"""Memory sizes and counts: text to bytes and back, plurals, and values that are not sizes."""

import math
from collections.abc import Callable

import pytest

from pytest_cka_memory import Holding, MemoryProbe, RegionRecord
from pytest_cka_memory.errors import CkaMemoryError, SizeError
from pytest_cka_memory.limits import Breach, flat_per_batch
from pytest_cka_memory.measure.loaders_and_steps import FirstBatches
from pytest_cka_memory.reports.failure import holding_lines
from pytest_cka_memory.reports.terminal import missing
from pytest_cka_memory.testing import ScriptedMeter
from pytest_cka_memory.units import (
    MB,
    counted,
    format_exact,
    format_size,
    megabytes,
    parse_megabytes,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0 B", 0),
        ("4 B", 4),
        ("4B", 4),
        ("512 KiB", 512 * 2**10),
        ("512 KB", 512 * 2**10),
        ("1 MiB", 2**20),
        ("1.5 MB", 3 * 2**19),
        ("  1   mb ", 2**20),
        ("2GiB", 2**31),
        ("0.5 gb", 2**29),
    ],
)
def test_units_are_powers_of_two(text: str, size: int) -> None:
    """Units are powers of two: KB and KiB are the same, because 1 MB is 2**20 bytes everywhere."""
    assert parse_size(text) == size
    assert megabytes(text) == size
    assert parse_megabytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "2KBanana",
        "",
        "MB",
        "1",
        "-1 MB",
        "1e3 MB",
        "1,5 MB",
        "1 000 MB",
        "1 TB",
        "1 MB 2",
        "nan MB",
    ],
)
def test_text_that_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    """Text that is not a size is refused: reading the '2KB' of '2KBanana' would hide a mistake."""
    with pytest.raises(
        SizeError, match=r"^cannot read .* as a memory size; write e\.g\. '512 KiB'"
    ):
        parse_size(text)


@pytest.mark.parametrize(
    ("number", "size"),
    [(0, 0), (0.0, 0), (-0.0, 0), (1, MB), (1.5, 3 * MB // 2), (1 / MB, 1), (2**40, 2**60)],
)
def test_a_bare_number_is_megabytes(number: float, size: int) -> None:
    """A bare number in a marker is in MB, and a fraction can express a single byte."""
    assert megabytes(number) == size


@pytest.mark.parametrize(
    "number",
    [-1, -1e-9, math.nan, math.inf, -math.inf, 1e308, 10**400],
    ids=["-1", "tiny", "nan", "inf", "-inf", "1e308", "10**400"],
)
def test_a_number_that_is_not_a_size_is_refused(number: float) -> None:
    """NaN would keep every limit, because no comparison with it is true, so it is refused."""
    with pytest.raises(SizeError, match=r"^a memory size cannot be .*; write a number of MB"):
        megabytes(number)


@pytest.mark.parametrize("value", [True, False, None, [1], 1j, b"1 MB", object], ids=repr)
def test_a_value_of_another_type_is_refused(value: object) -> None:
    """True is an int in Python and would mean 1 MB, so a value of another type is refused."""
    with pytest.raises(SizeError, match=r"^cannot read .* as a memory size; write a number of MB"):
        megabytes(value)


def test_a_text_too_long_for_a_float_is_refused() -> None:
    """Text too long for a float is refused; its OverflowError would be an internal error."""
    with pytest.raises(SizeError, match="as a memory size"):
        parse_size("9" * 400 + " GB")


@pytest.mark.parametrize(
    ("text", "size"), [("1", MB), ("0.5", MB // 2), ("4 B", 4), ("1e1", 10 * MB)]
)
def test_a_bare_number_on_the_command_line_is_megabytes(text: str, size: int) -> None:
    """A bare number on the command line is in MB, as the options' names end in ``-mb``."""
    assert parse_megabytes(text) == size


@pytest.mark.parametrize("text", ["nan", "-1", "inf", "x", "1e308"])
def test_the_command_line_refuses_what_a_marker_refuses(text: str) -> None:
    """The command line refuses what a marker refuses: a size has the same rules everywhere."""
    with pytest.raises(SizeError, match="memory size"):
        parse_megabytes(text)


def test_size_error_is_a_value_error_and_a_package_error() -> None:
    """A size error is a ValueError and an error of the package, so that both can be caught."""
    assert issubclass(SizeError, ValueError)
    assert issubclass(SizeError, CkaMemoryError)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.0, "0"),
        (1, "1 B"),
        (1023, "1023 B"),
        (-1023, "-1023 B"),
        (4.0, "4 B"),
        (5 / 3, "1.7 B"),
        (1 / 32, "0.03 B"),
        (1024, "1.0 KB"),
        (10239, "10.0 KB"),
        (1280, "1.3 KB"),
        (-1280, "-1.3 KB"),
        (2**20 * 4.125, "4.13"),
        (10240, "0.01"),
        (-(2**20), "-1.00"),
        (2**20 + 1, "1.00"),
        (2663.8 * 2**20, "2663.80"),
    ],
)
def test_format_size_returns_a_short_text_for_table_cells(size: float | None, text: str) -> None:
    """In table cells MB have no unit, and sizes too small for two decimals have their own."""
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (4, "4 bytes"),
        (10239, "10,239 bytes"),
        (10240, "10,240 bytes (0.01 MB)"),
        (2**20 + 1, "1,048,577 bytes (1.00 MB)"),
        (4.0, "4 bytes"),
        (20000.5, "20,000.5 bytes (0.02 MB)"),
        (1 / 32, "0.03 bytes"),
    ],
)
def test_format_exact_returns_every_byte(size: float, text: str) -> None:
    """Messages show exact bytes, because one can break a limit; only a mean has decimals."""
    assert format_exact(size) == text


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "batch", "1 batch"),
        (0, "batch", "0 batches"),
        (2, "full batch", "2 full batches"),
        (1, "region", "1 region"),
        (12_000, "region", "12,000 regions"),
    ],
)
def test_counts_have_the_right_plural(count: int, noun: str, text: str) -> None:
    """A count of one has a singular and other counts a plural: ``1 batch``, ``2 batches``."""
    assert counted(count, noun) == text


def test_messages_write_one_batch_and_one_region_in_the_singular(
    record: Callable[..., RegionRecord],
) -> None:
    """Messages about one batch, one region or one collected test have the singular."""
    breach = flat_per_batch().judge(record(levels=[0]))
    assert isinstance(breach, Breach)
    assert "because 1 full batch was seen and 5 are needed" in breach.message
    assert missing(["one"])[0].text.startswith("1 collected test has no result")
    holding = Holding(bytes=4, count=1, batches=1)
    assert list(holding_lines(holding)) == [
        "  1 tensor, 4 bytes, allocated in 1 batch",
        "    no Python reference to it was found",
    ]
    with pytest.raises(ValueError, match="the loader has 1 batch, but batch_counts asks for 2"):
        MemoryProbe(meter=ScriptedMeter()).sweep(list, [0], batch_counts=(1, 2))
    with pytest.raises(ValueError, match="the loader ended after 0 of 1 batch;"):
        list(FirstBatches(iter(()), 1))
