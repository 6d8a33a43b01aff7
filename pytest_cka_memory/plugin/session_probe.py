"""The probe of ``cka_memory_session``."""

from pytest_cka_memory.measure.probe import MemoryProbe


class SessionProbe(MemoryProbe):
    """Does not number equal labels, because they are numbered for each fixture."""

    def _unique_label(self, label: str) -> str:
        return label
