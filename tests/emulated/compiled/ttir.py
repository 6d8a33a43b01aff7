"""Builds kernels in TTIR around single operations, and runs them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from emulated_cuda.triton import memory, ttir
from emulated_cuda.triton.launches import Kernel
from emulated_cuda.triton.ttir import DTYPES

memory.use_library("libcuda.so.1")


def launch(text: str, arguments: Sequence[Any], grid: tuple[int, int, int] = (1, 1, 1)) -> None:
    """Run a kernel: tensors are passed as addresses, other arguments as they are."""
    kernel = Kernel(text, "kernel")
    assert kernel.problem is None, kernel.problem
    values = [
        torch.tensor([given.data_ptr()])
        if isinstance(given, torch.Tensor)
        else torch.tensor([given])
        for given in arguments
    ]
    kernel.launch(grid, values)


def function(arguments: str, body: str) -> str:
    """Return a module with one kernel."""
    return f"module {{\ntt.func public @kernel({arguments}) {{\n{body}\ntt.return\n}}\n}}\n"


def elements(element: str, numbers: Sequence[Any]) -> torch.Tensor:
    """Return numbers on the device, in an element type of TTIR."""
    numbers = list(numbers)
    exact = torch.float64 if any(isinstance(number, float) for number in numbers) else torch.int64
    return torch.tensor(numbers, dtype=exact).to(DTYPES[element]).cuda()


def apply(operation: str, inputs: Sequence[tuple[str, torch.Tensor]], result: str) -> torch.Tensor:
    """Apply an operation to whole tensors; return its result.

    Args:
        operation: such as ``arith.addi %x0, %x1 : tensor<4xi32>``.
        inputs: element types and tensors of one shape on the device, which it calls ``%x0``, ...
        result: its element type; single bits come back as bytes.
    """
    size = inputs[0][1].numel()
    stored = "i8" if result == "i1" else result
    out = torch.zeros(size, dtype=DTYPES[stored], device="cuda")
    lines = [f"%at = tt.make_range {{end = {size} : i32, start = 0 : i32}} : tensor<{size}xi32>"]

    def addressed(name: str, element: str) -> None:
        pointer = f"!tt.ptr<{element}>"
        lines.append(f"%s_{name} = tt.splat %{name} : {pointer} -> tensor<{size}x{pointer}>")
        types = f"tensor<{size}x{pointer}>, tensor<{size}xi32>"
        lines.append(f"%p_{name} = tt.addptr %s_{name}, %at : {types}")

    for index, (element, _) in enumerate(inputs):
        kept = "i8" if element == "i1" else element
        addressed(f"a{index}", kept)
        name = f"y{index}" if element == "i1" else f"x{index}"
        lines.append(f"%{name} = tt.load %p_a{index} : tensor<{size}x!tt.ptr<{kept}>>")
        if element == "i1":
            lines.append(
                f"%x{index} = arith.trunci %y{index} : tensor<{size}xi8> to tensor<{size}xi1>"
            )
    lines.append(f"%found = {operation}")
    addressed("out", stored)
    if result == "i1":
        lines.append(f"%wide = arith.extui %found : tensor<{size}xi1> to tensor<{size}xi8>")
    value = "%wide" if result == "i1" else "%found"
    lines.append(f"tt.store %p_out, {value} : tensor<{size}x!tt.ptr<{stored}>>")
    kinds = [("i8" if element == "i1" else element) for element, _ in inputs]
    arguments = [f"%a{index}: !tt.ptr<{kind}>" for index, kind in enumerate(kinds)]
    text = function(", ".join([*arguments, f"%out: !tt.ptr<{stored}>"]), "\n".join(lines))
    launch(text, [*(value for _, value in inputs), out])
    return out


def loaded(name: str, shape: tuple[int, ...], element: str) -> str:
    """Return the text that loads a whole contiguous tensor as ``%{name}``."""
    size = torch.Size(shape).numel()
    flat, full = f"tensor<{size}", "tensor<" + "x".join(map(str, shape))
    pointer = f"!tt.ptr<{element}>"
    return "\n".join(
        [
            f"%r_{name} = tt.make_range {{end = {size} : i32, start = 0 : i32}} : {flat}xi32>",
            f"%s_{name} = tt.splat %p_{name} : {pointer} -> {flat}x{pointer}>",
            f"%q_{name} = tt.addptr %s_{name}, %r_{name} : {flat}x{pointer}>, {flat}xi32>",
            f"%f_{name} = tt.load %q_{name} : {flat}x{pointer}>",
            f"%{name} = tt.reshape %f_{name} : {flat}x{element}> -> {full}x{element}>",
        ]
    )


def stored(value: str, name: str, shape: tuple[int, ...], element: str) -> str:
    """Return the text that stores a whole tensor through ``%p_{name}``."""
    size = torch.Size(shape).numel()
    flat, full = f"tensor<{size}", "tensor<" + "x".join(map(str, shape))
    pointer = f"!tt.ptr<{element}>"
    return "\n".join(
        [
            f"%r_{name} = tt.make_range {{end = {size} : i32, start = 0 : i32}} : {flat}xi32>",
            f"%s_{name} = tt.splat %p_{name} : {pointer} -> {flat}x{pointer}>",
            f"%q_{name} = tt.addptr %s_{name}, %r_{name} : {flat}x{pointer}>, {flat}xi32>",
            f"%f_{name} = tt.reshape {value} : {full}x{element}> -> {flat}x{element}>",
            f"tt.store %q_{name}, %f_{name} : {flat}x{pointer}>",
        ]
    )


@contextlib.contextmanager
def by_elements() -> Iterator[None]:
    """Compute each element of kernels that are read in this context, also of progressions."""
    rows = dict(ttir.ON_PROGRESSIONS)
    ttir.ON_PROGRESSIONS.clear()
    try:
        yield
    finally:
        ttir.ON_PROGRESSIONS.update(rows)
