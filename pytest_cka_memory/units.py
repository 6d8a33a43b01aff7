"""Read and write memory sizes and counts. MB means 2**20 bytes everywhere."""

import math
import re

from pytest_cka_memory.errors import SizeError

MB = 2**20

_UNITS = {"B": 1, "KB": 2**10, "KIB": 2**10, "MB": MB, "MIB": MB, "GB": 2**30, "GIB": 2**30}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d+)?)\s*([KMG]i?B|B)\s*", re.IGNORECASE)
_MOST = 2**63  # larger than any machine's memory, and exact as a float


def megabytes(value: object) -> int:
    """Return the bytes of a size as a user writes it: a number of MB, or a text with a unit.

    Raises:
        SizeError: for a negative or infinite number, NaN, a bool, or a text that is not a size.
    """
    if isinstance(value, str):
        return parse_size(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SizeError(f"cannot read {value!r} as a memory size; write a number of MB, e.g. 1.5")
    if not 0 <= value <= _MOST:  # also true for NaN
        raise SizeError(f"a memory size cannot be {value!r}; write a number of MB of at least 0")
    return round(value * MB)


def parse_size(text: str) -> int:
    """Return the bytes of a text like ``'512 KiB'``, ``'1.5 MB'`` or ``'4 B'``.

    Raises:
        SizeError: for any other text, and for a number without a unit.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise SizeError(f"cannot read {text!r} as a memory size; write e.g. '512 KiB' or '1.5 MB'")
    number, unit = match.groups()
    return round(float(number) * _UNITS[unit.upper()])


def parse_megabytes(text: str) -> int:
    """Return the bytes of a command-line limit; a number without a unit means MB."""
    try:
        number = float(text)
    except ValueError:
        return parse_size(text)
    return megabytes(number)


def counted(count: int, noun: str) -> str:
    """Return ``1 region``, ``12,000 regions``, ``2 batches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{plural}"


def format_size(size: float | None) -> str:
    """Format bytes for a table cell: MB without a unit, smaller sizes with: ``42.66``, ``4 B``."""
    if size is None:
        return "-"
    if size == 0:
        return "0"
    if abs(size) < 2**10:
        return f"{_number(size).replace(',', '')} B"
    if abs(size) < 10 * 2**10:
        return f"{_rounded(size / 2**10, 1)} KB"
    # At most seven characters up to a terabyte, so that tables do not become too wide.
    megabytes = size / MB
    digits = 2 if abs(megabytes) < 9_999.995 else 1 if abs(megabytes) < 99_999.95 else 0
    return _rounded(megabytes, digits)


def format_with_unit(size: float | None) -> str:
    """Format bytes in a few characters, with a unit also if it is MB: ``42.66 MB``, ``4 B``."""
    text = format_size(size)
    return f"{text} MB" if size and text[-1].isdigit() else text


def format_exact(size: float) -> str:
    """Format bytes for a sentence: ``1,048,577 bytes (1.00 MB)``, a mean as ``4.5 bytes``."""
    noun = "byte" if size == 1 else "bytes"
    approximate = f" ({_rounded(size / MB, 2)} MB)" if abs(size) >= 10 * 2**10 else ""
    return f"{_number(size)} {noun}{approximate}"


def _rounded(figure: float, digits: int) -> str:
    """Round halves up, in the same steps as ``sizes.js`` of the HTML page.

    Format specifications round them to the even digit, and JavaScript's ``toFixed()`` up.
    """
    scale = 10**digits
    return f"{math.copysign(math.floor(abs(figure) * scale + 0.5) / scale, figure):.{digits}f}"


def _number(size: float) -> str:
    """Format whole numbers as such, others with one decimal, or one digit if they are small."""
    if size == int(size):
        return f"{int(size):,}"
    return (
        f"{size:,.1f}"
        if abs(size) >= 1000
        else _rounded(size, 1)
        if abs(size) >= 0.05
        else f"{size:.1g}"
    )


def is_plain_number(value: object) -> bool:
    """Whether a value is a finite number of Python's own types: neither a bool nor a subclass."""
    return type(value) is int or (type(value) is float and math.isfinite(value))
