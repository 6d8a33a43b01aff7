"""One run of the step under changes: which modules it calls, and what it needed."""

import functools
import math
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TextIO

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.flop_counter import flop_registry

from pytest_cka_memory.meters.patching import Patch
from pytest_cka_memory.meters.torch_private import TorchDispatchMode
from pytest_cka_memory.repair import Edit, lines_passed, lines_to_change

OUT_OF_MEMORY = "out of memory"
"""The error of a trial for which the device is too small."""
EXACT = ""
"""The numbers stay the same, bit for bit."""
LAST_DIGITS = "last digits differ"
"""The numbers are rounded differently."""


class Figures(NamedTuple):
    """What one run needed, in bytes."""

    peak_bytes: int
    """The highest level, with what was live before."""
    reserved_bytes: int | None
    """The highest reserve; None if the device has none."""


class Copied:
    """Counts the bytes that a trial copies to the host."""

    def __init__(self) -> None:
        self.bytes = 0


Runner = Callable[[], Figures]
"""Runs the step once, from the same state each time, and returns its figures."""


class Trying(Protocol):
    """Returns a context in which a change is made without an edit, and undone at its end."""

    def __call__(self, copied: Copied) -> AbstractContextManager[object]:
        """Return the context; `copied` counts what it copies to the host."""


@dataclass(frozen=True)
class Change:
    """Something that may lower the peak."""

    name: str
    """In the table: ``checkpoint every Block``."""
    group: str
    """Of the changes of one group only one is made at a time."""
    trying: Trying
    numbers: str = EXACT
    """What it does to the numbers; empty if nothing. Has the word "change" if more than the last
    digits differ, see :func:`keeps_numbers`."""
    edits: tuple[Edit, ...] | None = None
    """What to write; None if the place is not known or it is not an edit."""
    advice: str = ""
    """What to write, in words, if there are no edits."""
    condition: str = ""
    """What must hold for :attr:`numbers` to be right, if the run could not show it."""
    recomputes: bool = False
    """Whether it computes something again."""
    rounds_updates: bool = False
    """Whether weights or the optimizer's states have fewer bits, which rounds each update."""
    cards: int = 1
    """How many cards it needs."""
    order: int = 0
    """The place in a combination: higher ones are further out."""
    part: Any = field(default=None, compare=False)
    """What the search needs to vary it, such as a selection of modules."""


@dataclass(frozen=True)
class Refusal:
    """A tempting change that is not tried, and why."""

    name: str
    because: str


@dataclass(frozen=True)
class Trial:
    """What a run under changes needed."""

    changes: tuple[Change, ...]
    figures: Figures | None
    """None if the run ended with an error."""
    error: str = ""
    """A short text if the run ended with an error."""
    place: str = ""
    """Where that was, if it ran out of memory, and what it asked for; empty if not known."""
    host_bytes: int = 0
    """What is copied to the host in the run, and back for backward."""
    flops: int | None = None
    """Floating-point operations of the run; None if they were not counted."""

    @property
    def name(self) -> str:
        """The changes, as a row of the table names them."""
        return " + ".join(change.name for change in self.changes) or "as it is"

    @property
    def numbers(self) -> str:
        """What the changes do to the numbers; empty if nothing."""
        return "; ".join(dict.fromkeys(c.numbers for c in self.changes if c.numbers))

    @property
    def conditions(self) -> list[str]:
        """What must hold for :attr:`numbers` to be right."""
        return list(dict.fromkeys(c.condition for c in self.changes if c.condition))

    @property
    def edits(self) -> tuple[Edit, ...] | None:
        """The edits of all changes, innermost first; None if those of one are not known."""
        changes = sorted(self.changes, key=lambda change: change.order)
        if any(change.edits is None for change in changes):
            return None
        return tuple(edit for change in changes for edit in change.edits or ())

    @property
    def cards(self) -> int:
        """How many cards it needs."""
        return max((change.cards for change in self.changes), default=1)

    @property
    def recomputes(self) -> bool:
        """Whether one of the changes computes something again."""
        return any(change.recomputes for change in self.changes)

    @property
    def lines(self) -> int:
        """How many lines are to be changed, as far as they are known."""
        return lines_to_change(edit for change in self.changes for edit in change.edits or ())

    @property
    def peak_bytes(self) -> int:
        """The peak of a run that ended."""
        assert self.figures is not None
        return self.figures.peak_bytes

    @property
    def reserved_bytes(self) -> int:
        """The highest reserve; 0 if the run did not end or the device has none."""
        return 0 if self.figures is None else self.figures.reserved_bytes or 0


def keeps_numbers(trial: Trial) -> bool:
    """Whether the numbers stay the same, but perhaps for their last digits."""
    return not any("change" in change.numbers for change in trial.changes)


def line_of(number: int, trial: Trial, seconds: float) -> str:
    """Return the line that shows the progress of a search after a trial."""
    outcome = trial.error if trial.figures is None else f"{trial.peak_bytes / 2**20:,.0f} MB"
    return f"{number:3}  {outcome:>12}  {trial.name}  ({seconds:.1f} s)"


_LEAST_LIMIT_S = 60.0
_MOST_TIMES = 10


def limit_after(seconds: float) -> float:
    """Return how many seconds a trial may take if the step as it is takes `seconds`."""
    return max(_LEAST_LIMIT_S, _MOST_TIMES * seconds)


class TooLongError(Exception):
    """A run took longer than it may."""

    names_error = True


def tried(
    changes: Sequence[Change],
    run: Runner,
    is_out_of_memory: Callable[[BaseException], bool],
    *,
    limit_s: float = math.inf,
) -> Trial:
    """Run the step once under `changes`. What it prints is dropped: its first run has shown it.

    Returns:
        The trial; with the text of the error if the step does not run under these changes, or
        takes longer than `limit_s` seconds.
    """
    copied = Copied()
    ordered = sorted(changes, key=lambda change: change.order)
    try:
        with ExitStack() as stack:
            for change in ordered:
                stack.enter_context(change.trying(copied))
            with _silent(), _ended_after(limit_s):
                figures = run()
    except Exception as error:
        named = getattr(error, "names_error", False)
        text = (str(error) if named else f"{type(error).__name__}: {error}").partition("\n")[0]
        if is_out_of_memory(error):
            return Trial(tuple(changes), None, OUT_OF_MEMORY, _place_of(error))
        return Trial(tuple(changes), None, text)
    return Trial(tuple(changes), figures, host_bytes=copied.bytes)


def _place_of(error: Exception) -> str:
    """Return the lines of the user's files that an error passed, and its own first line."""
    frames = traceback.extract_tb(error.__traceback__)
    passed = lines_passed((frame.filename, frame.lineno or 0, "") for frame in frames)
    return f"{passed and f'{passed}: '}{error}".partition("\n")[0]


@functools.cache
def _nowhere() -> TextIO:
    # Never closed: a logger that a step makes may keep it.
    return open(os.devnull, "w", encoding="utf-8")


@contextmanager
def _silent() -> Iterator[None]:
    """Drop what the block prints."""
    with redirect_stdout(_nowhere()), redirect_stderr(_nowhere()):
        yield


class _OverError(KeyboardInterrupt):
    """Not an ``Exception``, which the code of a step may catch."""


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End the block after so many seconds, also one that waits.

    By the alarm, which a program in the background gets, too, unlike Ctrl-C. If the alarm has a use
    already, or this is not the main thread, the block is not ended.

    Raises:
        TooLongError: if that was necessary.
    """
    is_free = hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    is_main = threading.current_thread() is threading.main_thread()
    if math.isinf(seconds) or not is_free or not is_main:
        yield
        return

    def end(_number: int, _frame: object) -> None:
        raise _OverError

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OverError:
        raise TooLongError(f"the run takes longer than {seconds:.0f} s") from None
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def flops_of(
    changes: Sequence[Change],
    run: Runner,
    beside: Callable[[Callable[[], int]], AbstractContextManager[object]] | None = None,
) -> int | None:
    """Return the floating-point operations of a run, by torch's formulas; None if it fails.

    Args:
        changes: what the run is tried under.
        run: runs the step once.
        beside: returns a context for the run; it gets a function that returns the operations that
            were counted so far.
    """
    counter = _Operations()
    try:
        with ExitStack() as stack:
            for change in sorted(changes, key=lambda change: change.order):
                stack.enter_context(change.trying(Copied()))
            if beside is not None:
                stack.enter_context(beside(lambda: counter.total))
            # A mode of its own may raise the peak, so these figures are not used.
            with _silent(), counter:
                run()
    except Exception:  # the counter refuses some code that runs without it
        return None
    return counter.total


class _Operations(TorchDispatchMode):
    """Counts floating-point operations as torch's ``FlopCounterMode`` does.

    That one also counts for each module, which takes longer than the run on an emulated device.
    """

    supports_higher_order_operators = True
    _whole: ClassVar[set[Any]] = set()
    """Operators that do not consist of others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", None)
        if packet is None:  # an operator of a higher order, which calls others
            return NotImplemented
        formula = flop_registry.get(packet)
        if formula is None and func not in self._whole:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._whole.add(func)
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=result))
        return result


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Any:
    """Replace an attribute of a module or class in the block."""
    patch = Patch(owner, name, function)
    try:
        patch.apply()
        yield
    finally:
        patch.undo()


class CallStack(threading.local):
    """The modules whose calls have not returned yet, outermost first; one for each thread."""

    def __init__(self) -> None:
        self.modules: list[torch.nn.Module] = []


@contextmanager
def calls_followed(
    begins: Callable[[torch.nn.Module, list[torch.nn.Module]], object] = lambda module, outer: None,
    ends: Callable[[torch.nn.Module, list[torch.nn.Module], Any, Any], object] = (
        lambda module, outer, arguments, result: None
    ),
) -> Iterator[CallStack]:
    """Call `begins` before each forward and `ends` after it, with the modules around it.

    `ends` also gets the arguments of the call, positional and named, and its result.
    """
    stack = CallStack()

    def before(module: torch.nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            return  # torch.compile would trace what follows
        begins(module, stack.modules)
        stack.modules.append(module)

    def after(module: torch.nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return
        kwargs, result = rest if len(rest) == 2 else ({}, rest[0])  # no names after an exception
        if module in stack.modules:
            while stack.modules.pop() is not module:
                pass  # calls that ended with an exception
        ends(module, stack.modules, (args, kwargs), result)

    handles = [
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, with_kwargs=True, always_call=True),
    ]
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()
        stack.modules.clear()


def class_of(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of a module; of one that is sharded, the class that it had before."""
    kind = type(module)
    return kind.__bases__[1] if _is_sharded(kind) else kind


def _is_sharded(kind: type) -> bool:
    bases = kind.__bases__
    return len(bases) == 2 and bases[0].__name__ == "FSDPModule"


def with_own_forward(kind: type[torch.nn.Module]) -> list[type[torch.nn.Module]]:
    """Return a class, and those that sharding has made of it if they have their own forward.

    Transformers gives each subclass of its layers one, which calls that of the class as it is then.
    """
    subclasses = kind.__subclasses__()
    return [kind, *(each for each in subclasses if _is_sharded(each) and "forward" in vars(each))]


def of_class(root: torch.nn.Module, kind: type) -> list[torch.nn.Module]:
    """Return the modules of exactly this class in `root`, in the order of ``root.modules()``."""
    return [module for module in root.modules() if class_of(module) is kind]


_DEEPEST = 4


def tensors_in(value: Any, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a function takes or returns, also those in objects of the user."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        for each in _parts_of(value):
            yield from tensors_in(each, depth - 1)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (torch.nn.Module, type)):
        return ()
    return list(getattr(value, "__dict__", {}).values())
