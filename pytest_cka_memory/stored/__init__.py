"""What is kept in files. This module itself says how a session uses baselines, and for which tests.

Every session that measures has such a plan. What reads baselines is imported if there are any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_cka_memory.errors import BaselineError

if TYPE_CHECKING:
    from pytest_cka_memory.core.conditions import Changed, Fingerprint
    from pytest_cka_memory.core.verdicts import Limit, Tolerance
    from pytest_cka_memory.stored.baselines import BaselineKey, Entries, Figures

MARKER = "memory_baseline"
DEFAULT_TOLERANCE = "5%"


@dataclass(frozen=True)
class BaselinePlan:
    """How a session uses baselines."""

    path: Path
    """The file; it must exist only if the user named it."""
    root: Path
    """Folder that the paths in test names are relative to."""
    tolerance_text: str = DEFAULT_TOLERANCE
    """For tests whose marker gives none."""
    named: bool = False
    """Whether the user named the file: then every measured test is compared with it."""
    updating: bool = False
    """Whether this session writes baselines; then it compares no test with them."""
    pruning: bool = False
    """Whether this session removes the lines of tests that no longer exist."""
    required: bool = False
    """Whether a region without a baseline fails."""

    @property
    def asked_for(self) -> bool:
        """Whether an option, not only a marker, asks for baselines."""
        return self.named or self.updating or self.pruning

    @cached_property
    def tolerance(self) -> "Tolerance":
        """How far figures may rise in tests whose marker does not say so.

        Raises:
            LimitError: if :attr:`tolerance_text` cannot be read.
        """
        from pytest_cka_memory.core.verdicts import parse_tolerance

        return parse_tolerance(self.tolerance_text)

    @cached_property
    def entries(self) -> "Entries":
        """Regions of the file, read on first use.

        Raises:
            BaselineError: if the file cannot be used, or does not exist and an option needs it.
        """
        if self.path.exists():
            from pytest_cka_memory.stored import baselines

            return baselines.read(self.path)
        if (self.named or self.pruning) and not self.updating:
            from pytest_cka_memory.stored.baselines import REMEDY

            raise BaselineError(f"{self.path} does not exist; {REMEDY}")
        return {}

    def measures(self, nodeid: str) -> bool:
        """Whether a test is measured because the file has it; raises like :attr:`entries`."""
        return self.asked_for and self.has(nodeid)

    def has(self, nodeid: str) -> bool:
        """Whether the file has figures of a test; raises like :attr:`entries`."""
        return nodeid in self._by_test

    def limit(
        self, text: str, nodeid: str, facts: "Mapping[str, Any] | None", tolerance: "Tolerance"
    ) -> "Limit":
        """Return the limit on the regions of a test; raises like :attr:`entries`.

        Args:
            text: the limit as the user writes it.
            nodeid: the test.
            facts: those of the meter; None before the device is known, so that the limit has no
                figures.
            tolerance: how far figures may rise.
        """
        from pytest_cka_memory.core.conditions import changed, conditions_of, fingerprint_of
        from pytest_cka_memory.stored.baselines import WithinBaseline

        fingerprint = None if facts is None else fingerprint_of(facts)
        now = None if facts is None else conditions_of(facts)
        known: dict[str, Figures] = {}
        changes: dict[str, Sequence[Changed]] = {}
        for key in self._by_test.get(nodeid, ()):
            differences = changed(key.conditions, now)
            # Of the lines of several machines, the one of the most similar machine.
            best = changes.get(key.label)
            if key.fingerprint == fingerprint and (best is None or len(differences) < len(best)):
                known[key.label], changes[key.label] = self.entries[key], differences
        device = None if fingerprint in self._fingerprints else fingerprint
        return WithinBaseline(text, tolerance, known, device, self.required, changes)

    @cached_property
    def _by_test(self) -> "Mapping[str, Sequence[BaselineKey]]":
        found: dict[str, list[BaselineKey]] = {}
        for key in self.entries:
            found.setdefault(key.nodeid, []).append(key)
        return found

    @cached_property
    def _fingerprints(self) -> "set[Fingerprint]":
        return {key.fingerprint for key in self.entries}
