"""What the user's code says: locals that hold tensors too long, and side effects of a forward.

A variable counts if all its uses are in one block and the first one assigns it: after the last
statement that uses it, nothing can read what it holds. Until the function returns or assigns it
again, it keeps that alive, as ``logits`` do in a training loop while the backward pass runs.

A side effect would happen twice if the forward ran again in backward.
"""

import ast
import functools
import random
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from pytest_cka_memory.repair import function_of, is_users
from pytest_cka_memory.repair.trials import tensors_in

_LEAST_BYTES = 2**10
_READING_ALL = {"locals", "vars", "eval", "exec"}
"""Functions by which a variable is read without its name."""
_MOST_FUNCTIONS = 4096


@dataclass(frozen=True)
class Unused:
    """A variable, and the lines outside of which nothing uses it."""

    code: CodeType
    name: str
    first: int
    last: int
    indent: int
    """Columns of the statement after which it can be deleted."""
    is_ambiguous: bool = False
    """Whether a variable of another function that can be deleted has the same name."""


class UnusedLocals:
    """Collects variables that hold tensors while nothing uses them any more."""

    def __init__(self) -> None:
        self.found: dict[Unused, int] = {}
        """Variable -> the most bytes that it was seen to hold."""

    def note(self, device: str) -> None:
        """Look at the frames of the user's functions that have led here."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if is_users(code.co_filename):
                line = frame.f_lineno
                held = [each for each in _variables(code) if not each.first <= line <= each.last]
                for each in held:
                    self._note(each, frame.f_locals.get(each.name), device)
            frame = frame.f_back

    def _note(self, variable: Unused, value: Any, device: str) -> None:
        tensors = [each for each in _tensors(value) if each.device.type == device]
        size = sum(each.nbytes for each in tensors if not isinstance(each, torch.nn.Parameter))
        # A small result may hold the graph that led to it.
        if size >= _LEAST_BYTES or any(each.grad_fn is not None for each in tensors):
            self.found[variable] = max(size, self.found.get(variable, 0))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, torch.Tensor):
                yield each


@lru_cache(_MOST_FUNCTIONS)
def _variables(code: CodeType) -> Sequence[Unused]:
    """Return the variables of a function that could be deleted after their last use."""
    if code.co_name.startswith("<") or _READING_ALL & set(code.co_names):
        return ()
    function = function_of(code)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ()
    inputs = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)
    own = set(code.co_varnames[inputs + bool(code.co_flags & 8) :]) - set(code.co_cellvars)
    uses: dict[str, list[ast.Name]] = {name: [] for name in own}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in uses:
            uses[node.id].append(node)
    lines = Path(code.co_filename).read_bytes().splitlines(keepends=True)
    unused: list[Unused] = []
    for block, targets in _blocks(function):
        for name in own & targets.keys():
            unused += _variable(code, name, uses[name], block, targets[name], lines)
    return tuple(unused)


def _blocks(function: ast.AST) -> Iterator[tuple[list[ast.stmt], dict[str, int]]]:
    """Yield each block with the names that it assigns, and the index of the first assignment;
    -1 for the variable of a loop.
    """
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list) or not block:
                continue
            targets: dict[str, int] = {}
            if isinstance(node, ast.For) and field == "body":
                targets |= dict.fromkeys(_names(node.target), -1)
            for number, statement in enumerate(block):
                for assignment in _assignments(statement):
                    for name in _targets(assignment):
                        targets.setdefault(name, number)
            yield block, targets


def _assignments(statement: ast.stmt) -> Iterator[ast.Assign]:
    """Yield the assignments that a statement surely makes: also those in a ``with`` block."""
    if isinstance(statement, ast.Assign):
        yield statement
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        for each in statement.body:
            yield from _assignments(each)


def _assignment(statement: ast.stmt, name: str) -> ast.Assign:
    return next(each for each in _assignments(statement) if name in _targets(each))


def _targets(assignment: ast.Assign) -> list[str]:
    return [name for target in assignment.targets for name in _names(target)]


def _names(target: ast.expr) -> list[str]:
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for each in target.elts for name in _names(each)]
    return []


def _variable(
    code: CodeType,
    name: str,
    uses: Sequence[ast.Name],
    block: Sequence[ast.stmt],
    first: int,
    lines: Sequence[bytes],
) -> Iterator[Unused]:
    """Yield a variable if all its uses are in `block`, from the statement `first` on."""
    inside = {
        id(node): number
        for number, statement in enumerate(block)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and node.id == name
    }
    outside = [node for node in uses if id(node) not in inside]
    if len(outside) > (first < 0):  # the target of the loop is outside its body
        return
    if first >= 0 and not _assigns_first(block[first], name):
        return
    numbers = list(inside.values())
    if any(number < first for number in numbers):
        return
    statement = block[max([*numbers, first, 0])]
    assert statement.end_lineno is not None
    indent = lines[statement.lineno - 1][: statement.col_offset]
    is_alone = not indent.strip() and _ends_its_line(statement, lines)
    if is_alone and not isinstance(statement, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
        # While its first value is computed, what it held before is not used any more.
        begin = block[0].lineno if first < 0 else _assignment(block[first], name).end_lineno
        assert begin is not None
        begin += first >= 0
        yield Unused(code, name, begin, statement.end_lineno, statement.col_offset)


def _assigns_first(statement: ast.stmt, name: str) -> bool:
    """Whether a statement assigns a name before anything in it reads what the name held before."""
    assignment = _assignment(statement, name)
    begin = (assignment.lineno, assignment.col_offset)
    uses = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == name]
    own = {id(node) for node in ast.walk(assignment.value)}
    return all((n.lineno, n.col_offset) >= begin and id(n) not in own for n in uses)


def _ends_its_line(statement: ast.stmt, lines: Sequence[bytes]) -> bool:
    assert statement.end_lineno is not None
    last = lines[statement.end_lineno - 1]
    after = last[statement.end_col_offset :].strip()
    return last.endswith(b"\n") and (not after or after.startswith(b"#"))


def side_effect(module: torch.nn.Module) -> Callable[[], str]:
    """Return a function that says what `module` has changed since; empty if nothing that shows."""
    buffers = {name: buffer._version for name, buffer in module.named_buffers(recurse=False)}
    before = dict(_comparable(module))
    known = dict(_globals_used(module))
    state = random.getstate()
    numpy = _numpy_state()

    def changed() -> str:
        for name, buffer in module.named_buffers(recurse=False):
            if buffers.get(name) != buffer._version:
                return f"its forward changes the buffer {name}"
        after = dict(_comparable(module))
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                return f"its forward changes self.{name}"
        if dict(_globals_used(module)) != known:
            return "its forward changes a global variable"
        if random.getstate() != state:
            return "its forward draws from Python's random numbers"
        if _numpy_state() != numpy:
            return "its forward draws from NumPy's random numbers"
        return ""

    return changed


def _comparable(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    # Without torch's own attributes: registries of parameters, modules and hooks.
    for name, value in vars(module).items():
        if name.startswith("_") and isinstance(value, (dict, set)):
            continue
        if isinstance(value, (bool, int, float, str, type(None))):
            yield name, value
        elif isinstance(value, torch.Tensor):
            yield name, (id(value), value._version)
        elif isinstance(value, (list, dict, set, tuple)):
            yield name, (id(value), len(value))
        else:
            yield name, id(value)


def _globals_used(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the global variables that the forward of a user's class names, as :func:`_comparable`
    does: those that it may change.
    """
    kind: Any = type(module)
    for name, values in _names_used(kind):
        value = values.get(name)
        if isinstance(value, (list, dict, set)):
            yield name, (id(value), len(value))
        elif isinstance(value, (bool, int, float, str)):
            yield name, value


@functools.lru_cache(maxsize=256)
def _names_used(kind: Hashable) -> list[tuple[str, dict[str, Any]]]:
    """Return the names that a forward uses, and the user's functions and methods it calls."""
    namespaces: list[tuple[str, dict[str, Any]]] = []
    seen: set[CodeType] = set()
    left: list[Any] = [getattr(kind, "forward", None)]
    while left:
        function = left.pop()
        code = getattr(function, "__code__", None)
        if code is None or code in seen or not is_users(code.co_filename):
            continue
        seen.add(code)
        values = function.__globals__
        for name in code.co_names:
            namespaces.append((name, values))
            for value in (values.get(name), getattr(kind, name, None)):
                if isinstance(value, FunctionType):
                    left.append(value)
                elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
                    left += [value.forward, value.backward]
    return namespaces


class UntilStep:
    """What a step does with the weights and options of an optimizer between backward and its step.

    An optimizer that steps in backward has updated the weights by then.
    """

    def __init__(self) -> None:
        self._weights: set[int] = set()
        self._options: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]
        self._options = weakref.WeakKeyDictionary()
        self._is_waiting = False
        self.because = ""
        """What makes an earlier step wrong; empty if nothing."""

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer and what it updates."""
        self._options[optimizer] = None
        for group in optimizer.param_groups:
            self._weights.update(map(id, group["params"]))

    def begins_backward(self) -> None:
        """Note the options with which an optimizer would step in this backward pass."""
        if not self._is_waiting:
            for optimizer in list(self._options):
                self._options[optimizer] = _options_of(optimizer)
            self._is_waiting = True

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whether the options are still the same."""
        known = self._options.get(optimizer)
        if known is not None and known != _options_of(optimizer):
            self.because = "options of the optimizer change between backward and step()"
        self.has_stepped()

    def has_stepped(self) -> None:
        """Note that an optimizer has stepped: also one whose closure ran the backward pass."""
        self._is_waiting = False

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note a call of a function of torch, outside of backward passes and optimizers."""
        if not self._is_waiting or self.because:
            return
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of a property
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name not in _VIEWS:
                return
        if name not in _WITHOUT_VALUES and any(id(t) in self._weights for t in tensors_in(args, 3)):
            self.because = "the step reads weights between backward and step()"


_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
_WITHOUT_VALUES = {
    *("numel", "nelement", "size", "dim", "ndimension", "stride", "element_size", "data_ptr"),
    *("is_floating_point", "is_complex", "is_contiguous", "untyped_storage", "get_device"),
    *("register_hook", "requires_grad_", "__set__", "__len__", "type", "storage_offset"),
    *("register_post_accumulate_grad_hook", "zeros_like", "empty_like", "ones_like", "backward"),
    *("new_zeros", "new_empty", "is_pinned", "is_shared", "__hash__", "__delete__"),
}


def _options_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, object]]:
    state: list[tuple[str, object]] = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                state.append((name, (id(value), value._version)))
            elif name != "params":
                state.append((name, value))
    return state


def random_state(device: str) -> object:
    """Return the states of torch's generators, for the host and a device."""
    states = [torch.get_rng_state().numpy().tobytes()]
    if device != "cpu":
        states.append(torch.get_device_module(device).get_rng_state().numpy().tobytes())
    return states


def _numpy_state() -> object:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, keys, position, *_ = numpy.random.get_state()
    return kind, keys.tobytes(), position
