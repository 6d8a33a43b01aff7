"""Find what references a storage, and write it as an expression that a user can type.

This module itself has everything that a program can name, and the references that lead from there
to other objects. The names are globals of modules, locals of running frames, and context variables.
No user code runs to read them: reading an attribute of a lazily loaded module would load it.

The references form a tree: of each object, only the reference by which a search met it first is
kept. So a path takes no memory of its own, and what a million paths share is visited only once.
"""

import contextvars
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pytest_cka_memory.core.places import is_installed, shown

CO_OPTIMIZED = 0x1
"""Flag of code whose locals are stored in slots: its ``f_locals`` is a copy."""

_OWN_REFERENCES = 3
"""References to a frame's dict of locals in `locals_of`: the frame's cache, the variable, and the
argument of ``getrefcount``."""
_MODULE_DICT: Any = vars(types.ModuleType)["__dict__"]


@dataclass(frozen=True)
class Root:
    """Values by name from which a search starts, and how to write these names."""

    prefix: str
    """Text before a name: ``net.`` for a module's globals, empty for a frame's locals."""
    suffix: str
    """Text after an expression: `` in train (loop.py:12)`` for a frame's locals."""
    names: Mapping[str, Any]
    is_library: bool = False
    """Whether the names belong to installed code, which users rarely type."""
    function: str = ""
    """The function of this thread whose locals these are; empty for other names."""

    @property
    def label(self) -> str:
        """What the names belong to: ``module net``, or ``a variable in train (loop.py:12)``."""
        if self.prefix:
            return f"module {self.prefix.removesuffix('.')}"
        if self.suffix.startswith(" in "):
            return f"a variable{self.suffix}"
        if self.suffix.startswith(" ("):
            return self.suffix.strip(" ()")
        return self.suffix.lstrip(", ") or "the interpreter"


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """Return a frame's locals, without leaving a copy in the frame that keeps them alive."""
    live = frame.f_locals
    copied = dict(live)
    # Before Python 3.13 a frame caches the dict that it returns, and with it every local's value.
    # If something else references the dict, the user got it from locals(), so it is not cleared.
    is_copy = type(live) is dict and frame.f_code.co_flags & CO_OPTIMIZED
    if is_copy and sys.getrefcount(live) <= _OWN_REFERENCES:
        live.clear()
    return copied


def modules() -> dict[str, types.ModuleType]:
    """Return every imported module; entries of other types are left out."""
    imported = list(sys.modules.items())
    return {name: it for name, it in imported if issubclass(type(it), types.ModuleType)}


def globals_of(module: types.ModuleType) -> dict[str, Any]:
    """Return what ``vars(module)`` returns, without loading a lazily loaded module."""
    names: dict[str, Any] = _MODULE_DICT.__get__(module)
    return names


def module_roots() -> Iterator[Root]:
    """Yield the globals of every imported module."""
    for name, module in modules().items():
        names = dict(globals_of(module))
        file = names.get("__file__")
        installed = type(file) is not str or is_installed(file)
        yield Root(f"{name}.", "", names, installed and name != "__main__")


def frame_roots(is_own: Callable[[str], bool]) -> Iterator[Root]:
    """Yield the locals of every running frame, of all threads, innermost first.

    Args:
        is_own: whether a file belongs to the plugin, whose frames are left out.
    """
    known = {id(globals_of(module)) for module in modules().values()}
    stacks = sys._current_frames()
    # This generator's own frame is replaced by its caller's: its locals would hold it, and through
    # it the locals of all its callers.
    stacks[threading.get_ident()] = sys._getframe(1)
    for thread, top in stacks.items():
        frame: types.FrameType | None = top
        while frame is not None:
            yield from _roots_of(frame, is_own, known, thread == threading.get_ident())
            frame = frame.f_back


def traceback_roots(error: BaseException, is_own: Callable[[str], bool]) -> Iterator[Root]:
    """Yield the locals of the frames of a traceback, which have ended, innermost first.

    Args:
        error: the exception that has the traceback.
        is_own: whether a file belongs to the plugin, whose frames are left out.
    """
    known = {id(globals_of(module)) for module in modules().values()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        yield from _roots_of(frame, is_own, known, is_of_this_thread=True)


def _roots_of(
    frame: types.FrameType,
    is_own: Callable[[str], bool],
    known: set[int],
    is_of_this_thread: bool,
) -> Iterator[Root]:
    code, outside = frame.f_code, frame.f_globals
    if is_own(code.co_filename):
        return
    where = f" in {code.co_name} ({shown(code.co_filename)}:{frame.f_lineno})"
    is_library = is_installed(code.co_filename)
    if code.co_flags & CO_OPTIMIZED:
        function = code.co_name if is_of_this_thread else ""
        yield Root("", where, locals_of(frame), is_library, function)
    if id(outside) not in known:  # code run by exec() belongs to no module
        known.add(id(outside))
        yield Root("", f", a global{where}", dict(outside), is_library)


def context_root() -> Root:
    """Return the context variables of this thread."""
    variables = contextvars.copy_context().items()
    names = {f"{variable.name}.get()": value for variable, value in variables}
    return Root("", " (a context variable)", names)


def signal_root() -> Root:
    """Return the functions that handle signals, which only C code references."""
    names: dict[str, Any] = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler):  # and not SIG_DFL or SIG_IGN
            # Most real-time signals have no name: these are plain numbers.
            text = f"signal.{number.name}" if isinstance(number, signal.Signals) else number
            names[f"signal.getsignal({text})"] = handler
    return Root("", "", names)


@dataclass(slots=True, eq=False)
class Reference:
    """A reference to an object, from another object or from a name in a root."""

    value: Any
    """The object that is referenced."""
    parent: Any
    """The object that references it; None if a root does."""
    root: Root | None = None
    text: str | None = None
    """How to write the reference, if known: a name in the root, or for example ``.grad_fn``."""


ReferencePath = Sequence[Reference]
"""References that lead from a root to an object, the first of them first."""


class ReferenceTree:
    """A path to each object that has a key which was looked for.

    Args:
        references: by the identity of an object, the reference by which it was met.
        holders: by key, the object that has it.
    """

    def __init__(
        self,
        references: Mapping[int, Reference] | None = None,
        holders: Mapping[int, Any] | None = None,
    ) -> None:
        self._holders = {} if holders is None else holders
        self._references = {} if references is None else references

    def __contains__(self, key: int) -> bool:
        return key in self._holders

    @property
    def keys(self) -> Set[int]:
        """The keys that objects have."""
        return self._holders.keys()

    @property
    def holders(self) -> Collection[Any]:
        """The objects that have a key, one for each key: tensors, not what references them."""
        return self._holders.values()

    @property
    def references(self) -> Collection[Reference]:
        """All references of the tree."""
        return self._references.values()

    def find(self, key: int) -> Reference | None:
        """Return the reference to the object that has `key`; None if there is none."""
        holder = self._holders.get(key)
        return None if holder is None else self._references[id(holder)]

    def last(self, key: int) -> Reference:
        """Return the reference to the object that has `key`."""
        return self._references[id(self._holders[key])]

    def start(self, first: Reference) -> object:
        """Return what is equal for paths that begin in the same way as the one with `first`."""
        assert first.root is not None, "a path starts at a root"
        return first.root.prefix, first.root.suffix, first.text

    def before(self, reference: Reference) -> Reference | None:
        """Return the reference to the parent of `reference`; None for the first of a path."""
        return None if reference.parent is None else self._references[id(reference.parent)]

    def upwards(self, reference: Reference) -> Iterator[Reference]:
        """Yield `reference`, the one before it, and so on to the first of the path."""
        step: Reference | None = reference
        while step is not None:
            yield step
            step = self.before(step)

    def path(self, key: int) -> list[Reference]:
        """Return the references that lead to the object that has `key`, the first of them first."""
        return self.path_to(self.last(key))

    def path_to(self, last: Reference) -> list[Reference]:
        """Return the references of the path that ends with `last`, the first of them first."""
        return [*self.upwards(last)][::-1]


def without_broken(references: dict[int, Reference], holders: Mapping[int, Any]) -> dict[int, Any]:
    """Return those `holders` to which `references` lead from a root.

    Others are left if another thread removes a reference while the tree is built.

    Args:
        references: by the identity of an object, the reference by which it was met.
        holders: by key, the object that has it.
    """
    leading: dict[int, bool] = {}
    for holder in holders.values():
        climbed, value = [], holder
        while value is not None and id(value) not in leading:
            climbed.append(id(value))
            reference = references.get(id(value))
            if reference is None:
                leading[id(value)] = False
                break
            value = reference.parent
        leads = value is None or leading[id(value)]
        leading.update(dict.fromkeys(climbed, leads))
    return {key: holder for key, holder in holders.items() if leading[id(holder)]}


class _Place(NamedTuple):
    """Where the path to an object leaves the first path of its group."""

    shared: int
    """How many references both begin with."""
    branch: int
    """Identity of the first object after these."""
    length: int
    """How many references lead to the object."""

    def then(self, identity: int) -> "_Place":
        """Return the place of an object to which this one leads."""
        return _Place(self.shared, self.branch or identity, self.length + 1)


class _Common(NamedTuple):
    """What the paths of a group have in common, as the properties of :class:`Paths` say."""

    shared: int
    branches: int
    longest: int


class Paths:
    """The paths to the holders of a group of storages, that of the largest first.

    Args:
        tree: has the references that lead to them.
        ends: the last reference of each path.
    """

    def __init__(self, tree: ReferenceTree, ends: Sequence[Reference]) -> None:
        self.tree, self.ends = tree, ends

    @cached_property
    def first(self) -> list[Reference]:
        """The path to the holder of the largest storage."""
        return self.tree.path_to(self.ends[0])

    @property
    def shared(self) -> list[Reference]:
        """The references with which all paths begin; never the whole of one."""
        return self.first[: self._common.shared]

    @property
    def branches(self) -> int:
        """How many objects follow after the shared references."""
        return self._common.branches

    @property
    def longest(self) -> int:
        """The references of the longest path."""
        return self._common.longest

    def objects_of(self, kind: type) -> int:
        """Return how many objects of a class are on the paths."""
        return sum(issubclass(type(reference.value), kind) for reference in self._steps())

    def all_lead_through(self, head: Any, is_kind: Callable[[type], bool]) -> bool:
        """Whether between `head` and the end of each path there are objects of some types only.

        A path that ends at `head` does, too.

        Args:
            head: an object.
            is_kind: whether a type is one of these.
        """
        leading = {id(head)}
        for last in self.ends:
            if id(last.value) in leading:
                continue
            climbed = []
            reference = self.tree.before(last)
            while reference is not None and id(reference.value) not in leading:
                if not is_kind(type(reference.value)):
                    return False
                climbed.append(id(reference.value))
                reference = self.tree.before(reference)
            if reference is None:
                return False
            leading.update(climbed)
        return True

    @cached_property
    def _common(self) -> "_Common":
        on_first = {id(reference.value): number for number, reference in enumerate(self.first)}
        known: dict[int, _Place] = {}
        count, longest = len(self.first) - 1, len(self.first)
        branches = {id(self.first[-1].value)}
        for last in self.ends:
            identity = id(last.value)
            number = on_first.get(identity)
            if number is None:
                before = known.get(id(last.parent)) or self._place_before(last, on_first, known)
                shared, branch = before.shared, before.branch or identity
                longest = max(longest, before.length + 1)
            else:  # this path ends at an object of the first path, so it shares all before that
                shared, branch = number, identity
            if shared < count:
                count = shared
                branches = {id(self.first[count].value)}
            if shared == count:
                branches.add(branch)
        return _Common(count, len(branches), longest)

    def _place_before(
        self, last: Reference, on_first: Mapping[int, int], known: dict[int, _Place]
    ) -> _Place:
        """Return the place of the parent of `last`, and note it in `known`."""
        inner = []
        place = _Place(0, 0, 0)
        reference = self.tree.before(last)
        while reference is not None:
            identity = id(reference.value)
            if identity in known:
                place = known[identity]
                break
            if identity in on_first:
                place = _Place(on_first[identity] + 1, 0, on_first[identity] + 1)
                break
            inner.append(identity)
            reference = self.tree.before(reference)
        for identity in reversed(inner):
            place = known[identity] = place.then(identity)
        if last.parent is not None:
            known[id(last.parent)] = place
        return place

    def _steps(self) -> Iterable[Reference]:
        known: set[int] = set()
        for last in self.ends:
            for reference in self.tree.upwards(last):
                if id(reference.value) in known:
                    break
                known.add(id(reference.value))
                yield reference
