"""Fixtures of the tests of repairs."""

from collections.abc import Callable
from typing import Any

import pytest

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.repair.report import RepairReport


@pytest.fixture(scope="session")
def repairs_of() -> Callable[..., RepairReport]:
    """Return a function that tries to repair a step on the CPU, and shows no progress."""

    def search(step: Callable[[], Any], **options: Any) -> RepairReport:
        return MemoryProbe("cpu").repairs(step, show=lambda line: None, **options)

    return search


@pytest.fixture
def table_of() -> Callable[[str], dict[str, str]]:
    """Return what reads the table of a report: name of each row -> its figures."""

    def read(text: str) -> dict[str, str]:
        head, *lines = text.partition("\n\n")[2].partition("\nSizes are in MB")[0].splitlines()
        start = head.index("change")
        rows: list[tuple[str, str]] = []
        for line in lines:
            figures, name = line[:start].strip(), line[start:]
            if figures or not rows:
                rows.append((name, figures))
            else:
                rows[-1] = (f"{rows[-1][0]} {name}", rows[-1][1])
        return {name.partition(" [")[0]: figures for name, figures in rows}

    return read
