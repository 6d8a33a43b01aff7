"""No signal handler's exception leaves a lock held, because no block that holds one has a loop.

Python 3.12 and 3.13 check for signals at the jump back to the start of a loop. If a loop, or a
comprehension, has a condition, that jump may be outside of every ``try`` and ``with`` block that
contains it, so that neither ``finally`` nor ``__exit__`` runs. A function that is called in the
block has no such effect.
"""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp)
OWN_FRAMES = (ast.FunctionDef, ast.Lambda, ast.ClassDef, ast.GeneratorExp)


def holds_lock(statement: ast.With) -> bool:
    return any(ast.unparse(item.context_expr).endswith("_lock") for item in statement.items)


def loops_in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the loops that run in the frame of `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, LOOPS):
            yield child
        if not isinstance(child, OWN_FRAMES):
            yield from loops_in(child)


def blocks_with_a_lock(package: str) -> Iterator[tuple[Path, ast.With]]:
    spec = find_spec(package)  # as installed, from a wheel or in a checkout
    assert spec is not None
    assert spec.origin is not None
    for path in Path(spec.origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.With) and holds_lock(node):
                yield path, node


def loops_that_hold_a_lock(package: str) -> list[str]:
    return [
        f"{path}:{loop.lineno}"  # type: ignore[attr-defined]
        for path, block in blocks_with_a_lock(package)
        for loop in loops_in(block)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pytest_cka_memory", "cka"])
def test_no_loop_runs_while_its_frame_holds_a_lock(package: str) -> None:
    """A loop that runs under a lock belongs in a function that the locked block calls."""
    assert loops_that_hold_a_lock(package) == []


def test_blocks_that_hold_a_lock_are_found() -> None:
    """The check finds each form of a loop under a lock, so it is able to fail."""
    assert len(list(blocks_with_a_lock("pytest_cka_memory"))) > 10
    block = ast.parse("with self._lock:\n    kept = [x for x in kept if x]").body[0]
    assert isinstance(block, ast.With)
    assert holds_lock(block)
    assert len(list(loops_in(block))) == 1
