"""Recognise renamed tests: a test that is gone and a new one with the same figures."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from pytest_cka_memory.baseline.file import BaselineKey, Entries, Figures
from pytest_cka_memory.core.report import file_of

_Signature = frozenset[tuple[BaselineKey, tuple[tuple[str, int | None], ...]]]


def renames(
    old: Mapping[BaselineKey, Figures],
    gone: Collection[str],
    measured: Mapping[BaselineKey, Figures],
) -> dict[str, str]:
    """Return old name -> new name of every test that was certainly renamed or moved.

    All regions of both tests must have the same labels, devices and figures. A test that was moved
    to another file must have kept its name; a test that was renamed must have kept its file. If
    both changed, some figure must not be 0, and no other test may have the same figures.

    Args:
        old: the entries of the baseline file.
        gone: tests in it that no longer exist.
        measured: what this session measured.
    """
    known = {key.nodeid for key in old}
    # Lines of other machines move with those of this one, but cannot be compared.
    on = {
        (key.fingerprint, conditions) for key in measured for conditions in (key.conditions, None)
    }
    before = _by_signature(
        {
            key: figures
            for key, figures in old.items()
            if key.nodeid in gone and (key.fingerprint, key.conditions) in on
        }
    )
    after = _by_signature({k: f for k, f in measured.items() if k.nodeid not in known})
    found: dict[str, str] = {}
    for signature, left in before.items():
        found |= _pairs(left, after.get(signature, []), any(_sizes(signature)))
    return found


def moved(entries: Mapping[BaselineKey, Figures], renamed: Mapping[str, str]) -> Entries:
    """Return the entries of renamed tests under their new names."""
    return {
        key._replace(nodeid=renamed[key.nodeid]): figures
        for key, figures in entries.items()
        if key.nodeid in renamed
    }


def _by_signature(entries: Mapping[BaselineKey, Figures]) -> dict[_Signature, list[str]]:
    regions: dict[str, set[tuple[BaselineKey, tuple[tuple[str, int | None], ...]]]] = {}
    for key, figures in entries.items():
        unnamed = key._replace(nodeid="", conditions=None)
        regions.setdefault(key.nodeid, set()).add((unnamed, tuple(sorted(figures.items()))))
    found: dict[_Signature, list[str]] = {}
    for nodeid, signature in regions.items():
        found.setdefault(frozenset(signature), []).append(nodeid)
    return found


def _sizes(signature: _Signature) -> Iterator[int]:
    return (size for _, figures in signature for _, size in figures if size)


def _pairs(before: Iterable[str], after: Iterable[str], has_sizes: bool) -> dict[str, str]:
    left, new = list(before), list(after)
    found: dict[str, str] = {}
    for part_of in (_test_of, file_of, *([_nothing] if has_sizes else [])):
        for part in {part_of(nodeid) for nodeid in left}:
            olds = [nodeid for nodeid in left if part_of(nodeid) == part]
            news = [nodeid for nodeid in new if part_of(nodeid) == part]
            if len(olds) == len(news) == 1:
                found[olds[0]] = news[0]
        left = [nodeid for nodeid in left if nodeid not in found]
        new = [nodeid for nodeid in new if nodeid not in found.values()]
    return found


def _test_of(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]


def _nothing(_: str) -> str:
    return ""
