"""Which tests a session has shown to be gone, and what several workers know together."""

from pathlib import Path

import pytest

from pytest_cka_memory.core.report import Collection, merged_collections

FILE = Collection(frozenset({"a/t.py::test_is"}), frozenset({"a/t.py"}))
FOLDER = Collection(frozenset({"a/t.py::test_is"}), frozenset({"a"}))
ROOT = Collection(frozenset({"a/t.py::test_is"}), frozenset({"."}))


@pytest.mark.parametrize(
    ("collection", "nodeid", "gone"),
    [
        (FILE, "a/t.py::test_is", False),
        (FILE, "a/t.py::test_was", True),
        (FILE, "a/t.py::TestClass::test_was", True),
        (FOLDER, "a/t.py::test_was", False),
        (FILE, "a/deleted.py::test_was", False),
        (FOLDER, "a/deleted.py::test_was", True),
        (FOLDER, "a/b/deleted.py::test_was", True),
        (FOLDER, "deleted.py::test_was", False),
        (ROOT, "deleted.py::test_was", True),
        (ROOT, "b/c/deleted.py::test_was", True),
        (ROOT, "a/deleted.py::test_was", False),
        (Collection(), "a/t.py::test_was", False),
    ],
)
def test_test_is_gone_only_if_all_beside_it_was_collected(
    collection: Collection, nodeid: str, gone: bool, tmp_path: Path
) -> None:
    """A test is gone only if all of its file was collected, or of
    its folder if the file is gone.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "t.py").touch()
    assert collection.shows_gone(nodeid, tmp_path) is gone


def test_workers_together_know_all_tests_and_what_each_collected_completely() -> None:
    """A test exists if any worker has collected it; together the workers know all tests."""
    one = Collection(frozenset({"t.py::a"}), frozenset({"t.py", "u.py"}))
    other = Collection(frozenset({"t.py::b"}), frozenset({"t.py"}))
    both = Collection(frozenset({"t.py::a", "t.py::b"}), frozenset({"t.py"}))
    assert merged_collections([one, other]) == both
    assert merged_collections([]) == Collection()
