"""Delete a local variable after its last use, so that what it holds is freed before the peak."""

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from pytest_cka_memory.repair import Edit, Insertion, patched
from pytest_cka_memory.repair.observation import Observed
from pytest_cka_memory.repair.trials import Change, Copied, Refusal
from pytest_cka_memory.repair.users_code import Unused

GROUP = "del"
_MOST = 3


def offers(observed: Observed) -> Iterator[Change | Refusal]:
    """Yield ``del`` for the variables that hold most after their last use, and for all of them."""
    sizes = observed.unused.found
    places: dict[tuple[CodeType, str, int], Unused] = {}
    for each in sorted(sizes, key=lambda each: (-sizes[each], each.last, each.name)):
        # Two blocks that end in one line may delete it: it is deleted once.
        places.setdefault((each.code, each.name, each.last), each)
    largest = list(places.values())[:_MOST]
    names = [each.name for each in largest]
    largest = [replace(each, is_ambiguous=names.count(each.name) > 1) for each in largest]
    for each in largest:
        yield _change([each])
    if len(largest) > 1:
        yield _change(largest)


def _label(variable: Unused) -> str:
    """Return a name that no other variable has: trials are known by the names of changes."""
    place = f" after {Path(variable.code.co_filename).name}:{variable.last}"
    return variable.name + (place if variable.is_ambiguous else "")


def _change(variables: Sequence[Unused]) -> Change:
    edits = tuple(map(_edit, variables))
    return Change(
        f"del {', '.join(map(_label, variables))}",
        GROUP,
        functools.partial(_trying, edits, tuple({each.code for each in variables})),
        edits=edits,
        order=-2,
        part=tuple(variables),
    )


def needed(
    change: Change, others: Sequence[Change], peak_of: Callable[[Change], int | None]
) -> Change:
    """Return the deletion of the fewest of its variables that lowers the peak as much.

    Args:
        change: of this module.
        others: changes that were tried already; a single one may do as well.
        peak_of: returns the peak under a change in bytes, None if the run ends with an error.
    """
    peak = peak_of(change)
    if peak is None or len(change.part) == 1:
        return change

    def does_as_well(other: Change) -> bool:
        peak_after = peak_of(other)
        return peak_after is not None and peak_after <= peak

    for other in others:
        if other.group == GROUP and len(other.part) == 1 and does_as_well(other):
            return other
    for variable in reversed(change.part):
        fewer = _change([each for each in change.part if each is not variable])
        if len(change.part) > 1 and does_as_well(fewer):
            change = fewer
    return change


def _edit(variable: Unused) -> Edit:
    text = f"{' ' * variable.indent}del {variable.name}\n"
    return Edit(variable.code.co_filename, (Insertion(variable.last + 1, 0, text),))


@contextmanager
def _trying(edits: Sequence[Edit], codes: Sequence[CodeType], copied: Copied) -> Iterator[None]:
    """Run the user's functions with the edited code, which is what the patch will run."""
    texts = patched(edits)
    with ExitStack() as stack:
        for code in codes:
            new = _edited(code, texts[code.co_filename])
            for function in _functions_with(code):
                stack.callback(setattr, function, "__code__", code)
                function.__code__ = new
        yield


def _functions_with(code: CodeType) -> list[FunctionType]:
    """Return the functions that run a code.

    The collector does not list what it was told to ignore, as programs do by ``gc.freeze()`` after
    their imports. So what modules and their classes define is looked at, too.
    """
    defined = (
        function
        for module in tuple(sys.modules.values())
        if getattr(module, "__file__", None) == code.co_filename
        for function in _defined_in(module)
    )
    known = chain(gc.get_referrers(code), defined)
    functions = {id(each): each for each in known if isinstance(each, FunctionType)}
    return [function for function in functions.values() if function.__code__ is code]


def _defined_in(module: ModuleType) -> Iterator[object]:
    """Yield what a module and its classes define, functions of methods and properties included."""
    namespaces: list[ModuleType | type] = [module]
    for namespace in namespaces:  # which grows meanwhile
        for value in tuple(vars(namespace).values()):
            if isinstance(value, type):
                if value.__module__ == module.__name__ and value not in namespaces:
                    namespaces.append(value)
            elif isinstance(value, property):
                yield value.fget
            else:
                yield getattr(value, "__func__", value)  # of a static method or a class method


def _edited(code: CodeType, text: str) -> CodeType:
    """Return the code of a function in the new text of its file."""
    file = code.co_filename
    before = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    after = compile(text, file, "exec", dont_inherit=True)
    pairs = zip(_codes(before), _codes(after), strict=True)
    wanted = (code.co_name, code.co_firstlineno)
    return next(new for old, new in pairs if (old.co_name, old.co_firstlineno) == wanted)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)
