"""Branches, loops and calls (dialects ``scf`` and ``cf``, ``tt.call``), prints and assertions.

A kernel prints by ``device_print`` and asserts by ``device_assert``.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from emulated_cuda.triton.memory import active_mask
from emulated_cuda.triton.numbers import unsigned
from emulated_cuda.triton.programs import Environment, Programs, choose, prepare
from emulated_cuda.triton.ttir import (
    Compute,
    KernelError,
    NotComputed,
    Operation,
    control,
    operation,
)


@operation("tt.print")
def print_values(op: Operation) -> Compute:
    """Print each element on a line: ``pid (0, 0, 0) idx (3) text: 1.000000``."""
    prefix = op.quoted()
    in_hexadecimal = op.is_set("hex")
    signs = re.search(r"isSigned = array<i32: ([^>]*)>", op.attributes)
    has_sign = [int(part) != 0 for part in signs[1].split(",")] if signs else []

    def compute(programs: Programs, *values: torch.Tensor) -> None:
        active = [True] * programs.count if programs.active is None else programs.active.tolist()
        lines = []
        for program in range(programs.count):
            if not active[program]:
                continue
            position = ", ".join(str(int(programs.ids[axis][program])) for axis in "xyz")
            if not values:
                lines.append(f"pid ({position}) idx ()" + prefix)
            for number, value in enumerate(values):
                is_signed = has_sign[number] if number < len(has_sign) else True
                of_one = value[program if len(value) > 1 else 0]
                operand = f" (operand {number})" if len(values) > 1 else ""
                for index, element in _elements(of_one):
                    shown = _shown(element, in_hexadecimal, is_signed)
                    lines.append(f"pid ({position}) idx ({index}){prefix}{operand}{shown}")
        print("\n".join(lines), flush=True)

    return compute


def _elements(value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if not value.dim():
        return [("", value)]
    return [
        (", ".join(map(str, index)), value[tuple(index)])
        for index in torch.cartesian_prod(*map(torch.arange, value.shape))
        .view(-1, value.dim())
        .tolist()
    ]


def _shown(element: torch.Tensor, in_hexadecimal: bool, is_signed: bool) -> str:
    if in_hexadecimal:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
            element.element_size()
        ]
        size = element.element_size()
        return f"0x{int(element.view(bits)) & (2 ** (8 * size) - 1):0{2 * size}x}"
    if element.dtype.is_floating_point:
        return f"{element.item():f}"
    if element.dtype is torch.bool or is_signed:
        return str(int(element))
    return str(int(unsigned(element)) & (2 ** (8 * element.element_size()) - 1))


@operation("tt.assert", "cf.assert")
def assert_true(op: Operation) -> Compute:
    """End the kernel with an error if a condition is false."""
    message = op.quoted()

    def compute(programs: Programs, condition: torch.Tensor, *mask: Any) -> None:
        failed = ~condition.bool()
        active = active_mask(programs, None, condition.dim())
        if active is not None:
            failed = failed & active
        if not failed.any():
            return
        program = int(failed.reshape(len(failed), -1).any(1).nonzero()[0])
        position = ", ".join(str(int(programs.ids[axis][program])) for axis in "xyz")
        raise KernelError(
            KernelError.ASSERT,
            f"device-side assert triggered in the kernel {programs.name}, program ({position}): "
            f"{message}",
        )

    return compute


MOST_ITERATIONS = 2**18
"""A ``while`` that runs longer never ends, such as one that waits for a later program."""


@control("scf.for")
def loop_over_range(op: Operation) -> Compute:
    """Run the region for each number of a range; the results are the last iteration's values."""
    assert op.iteration is not None
    counter, names = op.iteration.counter, op.iteration.names
    (code,) = prepare(op.regions[0], [counter, *names])

    def iterate(
        programs: Programs, values: Environment, number: Any, operands: list[Any]
    ) -> list[Any]:
        values[counter] = number
        values.update(zip(names, operands, strict=True))
        return programs.values_passed(programs.run(code, values), values)

    def compute(programs: Programs, values: Environment) -> list[Any]:
        low, high, step, *carried = [values[name] for name in op.operands]
        if len(low) == len(high) == len(step) == 1:  # the same for all programs: no mask is needed
            for number in range(int(low), int(high), int(step)):
                counted = torch.tensor([number], dtype=low.dtype)
                carried = iterate(programs, values, counted, carried)
            return carried
        # Programs whose range is shorter wait, masked, for those with the most iterations.
        distance = high - low + step - 1
        trips = torch.div(distance, step, rounding_mode="floor").clamp_min(0)
        outer = programs.active
        if outer is not None:
            # The bounds of a program in another branch may be anything, also very large.
            trips = torch.where(outer, trips, 0)
        for trip in range(int(trips.max())):
            active = trip < trips
            programs.active = None if active.all() else active.expand(programs.count)
            counted = (low + trip * step).to(low.dtype)
            carried = programs.merged(iterate(programs, values, counted, carried), carried)
        programs.active = outer
        return carried

    return compute


@control("scf.if")
def branch(op: Operation) -> Compute:
    """Run the first region if the condition is true, otherwise the second, if there is one."""
    codes = [prepare(region)[0] for region in op.regions]

    def compute(programs: Programs, values: Environment) -> list[Any]:
        condition = values[op.operands[0]]
        if len(condition) == 1:  # all programs take the same branch
            if not condition.item() and len(codes) == 1:
                return []
            end = programs.run(codes[0 if condition.item() else 1], values)
            return programs.values_passed(end, values)
        outer = programs.active
        branch_results: list[tuple[torch.Tensor, list[Any]]] = []
        for meets, code in zip((condition, ~condition), codes, strict=False):
            mask = programs.narrowed(meets)
            if not mask.any() and (branch_results or code is not codes[-1] or not op.results):
                # No program takes this branch. The last one is run all the same if none was run so
                # far: its results have the right shapes, and an `if` with results must return some.
                continue
            programs.active = None if mask.all() else mask
            branch_results.append(
                (mask, programs.values_passed(programs.run(code, values), values))
            )
            programs.active = outer
        if not op.results:
            return []
        if len(branch_results) == 1:
            return branch_results[0][1]
        (mask, first), (_, second) = branch_results
        return [choose(mask, *pair) for pair in zip(first, second, strict=True)]

    return compute


@control("scf.while")
def loop_while(op: Operation) -> Compute:
    """Run the second region, the body, while the first one says so; it also passes values on."""
    assert op.iteration is not None
    names = op.iteration.names
    (before,) = prepare(op.regions[0], names)
    (body,) = prepare(op.regions[1])

    def compute(programs: Programs, values: Environment) -> list[Any]:
        carried = [values[name] for name in op.operands]
        outer, results = programs.active, None
        for _ in range(MOST_ITERATIONS):
            values.update(zip(names, carried, strict=True))
            condition, *passed = programs.values_passed(programs.run(before, values), values)
            # A program that has ended keeps the values that it ended with.
            results = passed if results is None else programs.merged(passed, results)
            if len(condition) == 1:
                if not condition.item():
                    break
            else:
                going_on = programs.narrowed(condition)
                if not going_on.any():
                    break
                programs.active = going_on
            values.update(zip(body.arguments, results, strict=True))
            new = programs.values_passed(programs.run(body, values), values)
            carried = programs.merged(new, carried) if len(new) == len(carried) else new
        else:
            raise KernelError(
                KernelError.TIMEOUT,
                f"the launch timed out and was terminated: a loop of the kernel {programs.name} "
                f"did not end after {MOST_ITERATIONS:,} iterations. The loop may be waiting for "
                "another program of the grid that has not run yet, because the emulated device "
                "does not run programs concurrently; run such a kernel on a GPU",
            )
        programs.active = outer
        return results or []

    return compute


@operation("tt.call")
def call(op: Operation) -> Compute:
    """Call a function that Triton has not inlined."""
    name = re.match(r'@("[^"]*"|[\w$.-]+)', op.text)
    if name is None:
        raise NotComputed(f"cannot compute the call {op.text}")
    callee = name[1].strip('"')

    def compute(programs: Programs, *arguments: Any) -> Any:
        results = programs.call(callee, arguments)
        return results[0] if len(op.results) == 1 else results

    return compute
