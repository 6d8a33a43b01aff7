"""Import modules of this package as Python does, without pytest's rewriting of assertions.

pytest rewrites the assertions in all modules of a plugin's distribution, because a plugin may have
helpers for tests. Ours has none, and every session that measures would wait for it: it takes a
third of the time of our imports.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def plain_imports() -> Iterator[None]:
    """Leave pytest's finder out of the imports in the block."""
    finders = [finder for finder in sys.meta_path if _is_of_pytest(finder)]
    for finder in finders:
        sys.meta_path.remove(finder)
    try:
        yield
    finally:
        sys.meta_path[:0] = finders  # in front, where pytest has put them


def _is_of_pytest(finder: object) -> bool:
    return type(finder).__module__ == "_pytest.assertion.rewrite"
