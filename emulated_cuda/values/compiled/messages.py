"""``device_print`` and ``device_assert``."""

from __future__ import annotations

import re
from typing import Any

import torch

from emulated_cuda.values.compiled.accesses import active_mask
from emulated_cuda.values.compiled.errors import KernelError
from emulated_cuda.values.compiled.integers import unsigned
from emulated_cuda.values.compiled.operations import Operation
from emulated_cuda.values.compiled.programs import Programs
from emulated_cuda.values.compiled.table import Compute, operation


@operation("tt.print")
def print_values(one: Operation) -> Compute:
    """Print each element on a line: ``pid (0, 0, 0) idx (3) text: 1.000000``."""
    prefix = one.quoted()
    in_hexadecimal = one.is_set("hex")
    found = re.search(r"isSigned = array<i32: ([^>]*)>", one.attributes)
    has_sign = [int(part) != 0 for part in found[1].split(",")] if found else []

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
def assert_true(one: Operation) -> Compute:
    """End the kernel with an error if a condition is false."""
    message = one.quoted()

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
            f"device-side assert triggered: the kernel {programs.name} in program ({position}): "
            f"{message}",
        )

    return compute
