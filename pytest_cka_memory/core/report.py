"""The report of a session: every region of every process, and what could not be measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_cka_memory.core.collection import Collection
from pytest_cka_memory.core.verdicts import Result


@dataclass(frozen=True)
class Report:
    """A session: every file, table and page is made from it."""

    session: Mapping[str, Any]
    """Device, meter, versions, start time; see the JSON schema."""
    results: tuple[Result, ...]
    """Every region, in the order of collection."""
    missing: tuple[str, ...] = ()
    """Collected tests without a result."""
    unmeasured: Mapping[str, int] = field(default_factory=dict)
    """Reason why tests could not be measured -> number of tests."""
    collected: frozenset[str] = frozenset()
    """Every test of the session, measured or not."""
    narrowed: bool = False
    """Whether tests of a file may have been left out, by -k, -m, ``file.py::test`` and the like."""
    collection: Collection = field(default_factory=Collection)
    """Which tests exist; recorded only for ``--cka-memory-prune-baseline``."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Worker -> facts about its device; the cards of one machine may differ."""
    locations: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    """Measured test -> its file, relative to pytest's root, and its first line, from 1."""
    problems: tuple[str, ...] = ()
    """Reasons why the session failed that belong to no test."""
