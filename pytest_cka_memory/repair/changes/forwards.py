"""Wrap the ``forward`` of modules: in a trial, and as text for the user's files."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pytest_cka_memory.repair.edits import Edit, decorated, wrapped
from pytest_cka_memory.repair.observation import Root
from pytest_cka_memory.repair.trials import calls_followed, class_of, replaced, with_own_forward
from pytest_cka_memory.repair.written import text_of, with_forward

Forward = Callable[..., Any]
Wrapper = Callable[[Forward], Forward]


@contextmanager
def forward_of_class(
    kind: type[torch.nn.Module],
    wrapper: Wrapper,
    chosen: Callable[[torch.nn.Module], bool] = lambda module: True,
) -> Iterator[None]:
    """Wrap the forward of the modules of one class that are chosen, in the block."""
    is_ended: list[bool] = []  # a class that is made in the block may keep the new forward

    def choosing(plain: Forward) -> Forward:
        changed = wrapper(plain)

        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            wanted = not is_ended and class_of(module) is kind and chosen(module)
            return (changed if wanted else plain)(module, *args, **kwargs)

        return forward

    with ExitStack() as stack:
        stack.callback(is_ended.append, True)
        for owner in with_own_forward(kind):
            stack.enter_context(replaced(owner, "forward", choosing(owner.forward)))
        yield


@contextmanager
def forward_of_roots(roots: list[Root], wrapper: Wrapper) -> Iterator[None]:
    """Wrap the forward of the models, where they are called as such, in the block."""
    with ExitStack() as stack:
        calls = stack.enter_context(calls_followed())
        for kind in dict.fromkeys(root.kind for root in roots):
            stack.enter_context(
                forward_of_class(kind, wrapper, lambda module: calls.modules == [module])
            )
        yield


def edits_of_roots(
    roots: list[Root], decorator: str, wrap: str, *helpers: str
) -> tuple[Edit, ...] | None:
    """Return the edits that wrap the forward of models; None if the place is not known.

    Args:
        roots: the models.
        decorator: what is written above a forward of the user's.
        wrap: an expression for the wrapper, for a class that is not the user's.
        helpers: code that both need.
    """
    edits: dict[object, Edit] = {}
    for root in roots:
        edit = decorated(root.kind.forward.__code__, f"@{decorator}", *helpers)
        if edit is None and root.made_at is not None:
            after = f", {wrap})"
            edit = wrapped(root.made_at, "with_forward(", after, *helpers, text_of(with_forward))
        if edit is None:
            return None
        edits[edit.file, edit.insertions] = edit
    return tuple(edits.values())
