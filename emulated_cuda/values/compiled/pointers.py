"""Which arguments of a kernel point to what it reads, and which to what it writes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

from emulated_cuda.values.compiled.operations import Block, Function, Operation, all_operations

_READING = (
    *("tt.load", "tt.atomic_load", "tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_poll"),
    *("tt.descriptor_load", "tt.descriptor_gather", "tt.descriptor_reduce", "tt.call"),
)
_WRITING = (
    *("tt.store", "tt.atomic_store", "tt.atomic_rmw", "tt.atomic_cas", "tt.call"),
    *("tt.descriptor_store", "tt.descriptor_scatter", "tt.descriptor_reduce"),
)
_FROM_MEMORY = -1
"""In place of an argument: an address that the kernel has loaded."""


@dataclass(frozen=True)
class Accessed:
    """Positions of a kernel's arguments."""

    read: frozenset[int]
    written: frozenset[int]
    is_complete: bool
    """Whether it reads and writes nothing else; not if it loads addresses from memory."""


def accessed(function: Function) -> Accessed:
    """Return what a kernel may read and write, following its addresses from the arguments."""
    roots: dict[str, set[int]] = defaultdict(set)
    for index, (name, kind) in enumerate(
        zip(function.arguments, function.argument_types, strict=True)
    ):
        if kind.is_pointer or kind.is_descriptor:
            roots[name].add(index)
    size = -1
    while size != (size := sum(map(len, roots.values()))):  # until nothing is added
        for one in all_operations(function.blocks):
            _follow(one, roots)
        _follow_jumps(function.blocks, roots)
    read: set[int] = set()
    written: set[int] = set()
    for one in all_operations(function.blocks):
        hidden = one.name == "tt.call" or _has_addresses_in_assembly(one)
        targets = one.operands if hidden else one.operands[:1]
        found = set(chain.from_iterable(roots[name] for name in targets))
        if hidden or one.name in _READING:
            read |= found
        if hidden or one.name in _WRITING:
            written |= found
    is_complete = _FROM_MEMORY not in read | written
    return Accessed(
        frozenset(read - {_FROM_MEMORY}), frozenset(written - {_FROM_MEMORY}), is_complete
    )


def _has_addresses_in_assembly(one: Operation) -> bool:
    """Whether an operation is assembly that may read and write memory."""
    return one.name == "tt.elementwise_inline_asm" and "[" in one.quoted()


def _follow(one: Operation, roots: dict[str, set[int]]) -> None:
    """Pass the arguments from which the operands of an operation come on to its results."""
    if one.name in ("tt.load", "tt.atomic_load", "tt.call"):
        if one.name == "tt.call" or one.operand_types[0].pointee.is_pointer:
            for name in one.results:
                roots[name].add(_FROM_MEMORY)
    elif not one.regions:
        found = set(chain.from_iterable(roots[name] for name in one.operands))
        if found and one.name not in _READING:
            for name in one.results:
                roots[name] |= found
    else:
        _follow_regions(one, roots)


def _follow_regions(one: Operation, roots: dict[str, set[int]]) -> None:
    ends = [region[-1].operations[-1].operands for region in one.regions]
    names = one.iteration.names if one.iteration is not None else []
    if one.name == "scf.for":
        _pass_on(one.operands[3:], names, roots)
        _pass_on(ends[0], names, roots)
        _pass_on(names, one.results, roots)
    elif one.name == "scf.while":
        _pass_on(one.operands, names, roots)
        _pass_on(ends[0][1:], one.regions[1][0].arguments, roots)
        _pass_on(ends[0][1:], one.results, roots)
        _pass_on(ends[1], names, roots)
    elif one.name == "scf.if":
        for end in ends:
            _pass_on(end, one.results, roots)


def _follow_jumps(blocks: list[Block], roots: dict[str, set[int]]) -> None:
    for block in blocks:
        end = block.operations[-1]
        if end.name in ("cf.br", "cf.cond_br"):
            found = set(chain.from_iterable(roots[name] for name in end.operands))
            for other in blocks:
                for name in other.arguments if f"^{other.label}" in end.text else ():
                    roots[name] |= found


def _pass_on(given: list[str], names: list[str], roots: dict[str, set[int]]) -> None:
    for source, target in zip(given, names, strict=False):
        roots[target] |= roots[source]
