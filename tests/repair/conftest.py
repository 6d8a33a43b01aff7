"""Fixtures of the tests of repairs."""

from collections.abc import Callable
from typing import Any

import pytest

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.repair.report import RepairReport


@pytest.fixture(scope="module", autouse=True)
def _imports_excluded(imports_excluded_from_search: None) -> None:
    """Hide what was imported from collections and from the meter in every module of this folder."""


@pytest.fixture(scope="session")
def repairs_of() -> Callable[..., RepairReport]:
    """Return a function that tries to repair a step on the CPU, and shows no progress."""

    def search(step: Callable[[], Any], **options: Any) -> RepairReport:
        return MemoryProbe("cpu").repairs(step, show=lambda line: None, **options)

    return search
