"""Run operators of PyTorch's own database on the emulated device, and look at each CPU alias.

No call may change the size, the strides or the storage of an alias, or write to memory of the
device that is not an alias's: see :mod:`emulated_cuda.values`. Each operator runs forward,
backward and in place, and with ``out=`` of the right size, of another size and empty. Each operator
of the dispatcher that it calls runs with ``out`` as well, if it has such a form.

``python tests/emulated/aliases_of_operators.py`` runs all operators, which takes some minutes, and
goes on after a crash; names of operators as arguments run these. It prints one line for each
operator that breaks the rule, and how many calls there were. Operators run better with scipy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

DTYPES = ("float32", "bfloat16", "complex64", "int64", "bool")
SAMPLES = 3
FIRST = 10
"""How many samples are drawn to choose from: the last are often the ones with more arguments."""
OTHER_SIZE = 7
LARGEST = 2**21
"""Bytes of the segments that are compared: those of small tensors."""

MARK = 0x5A
"""In each byte of outputs of that size: ``resize_`` copies them to the new address itself."""
CRASHING = ("mvlgamma",)
"""Operators that end the process if they change integers in place, on the CPU too (torch 2.9)."""


# ---- What is looked at ----


class Watch:
    """The aliases of one call, and the device's memory before it."""

    def __init__(self) -> None:
        self.calls = 0
        self.problems: set[str] = set()
        self._aliases: list[tuple[Any, Any]] = []
        self._before: dict[int, Any] = {}
        self._is_on = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Note every alias that the device makes in this context."""
        from emulated_cuda import values
        from emulated_cuda.values import operators

        original, run_original, library = values.alias, operators.run, operators.library()
        zero = library.zero

        def alias(tensor: Any) -> Any:
            found = original(tensor)
            if self._is_on and tensor.is_cuda and not tensor.is_quantized:
                self._aliases.append((found, _form(found)))
            return found

        def run_own_operator(*args: Any, **kwargs: Any) -> Any:
            given = args[2]
            if len(given) == 1 and getattr(given[0], "numel", lambda: 0)() == 1:
                return run_original(*args, **kwargs)  # texts of errors read every element
            self._look_at_memory()
            try:
                return run_original(*args, **kwargs)
            finally:  # what torch's own operator copies to the device is right
                self._remember_memory()

        def zero_and_remember(*args: Any) -> None:
            zero(*args)
            self._remember_memory()

        modules = [
            module
            for name, module in sys.modules.items()
            if name.startswith("emulated_cuda.values")
            and getattr(module, "alias", None) is original
        ]
        with mock.patch.multiple(operators, run=run_own_operator), contextlib.ExitStack() as stack:
            for module in modules:
                stack.enter_context(mock.patch.object(module, "alias", alias))
            stack.enter_context(mock.patch.object(library, "zero", zero_and_remember))
            yield

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Look at the aliases of what is called in this context; what it raises is ignored."""
        self._aliases, self._is_on = [], True
        self._remember_memory()
        self.calls += 1
        try:
            with contextlib.suppress(Exception):
                yield
        finally:
            self._look_at_memory()
            self._is_on = False
        for alias, form in self._aliases:
            if _form(alias) != form:
                self.problems.add(f"alias of {form[:2]} became {_form(alias)[:2]}")
        self._aliases = []

    def _remember_memory(self) -> None:
        if self._is_on:
            self._before = {start: _bytes_at(start, size) for start, size in _segments()}

    def _look_at_memory(self) -> None:
        if not self._is_on:
            return
        for start, size in _segments():
            old = self._before.get(start)
            if old is None:
                continue
            size = min(size, old.numel())
            old, new = old[:size], _bytes_at(start, size, copied=False)
            changed = (old != new) & (new != MARK)
            if not changed.any():
                continue
            for _, form in self._aliases:
                _clear(changed, start, form)
            if changed.any():
                self.problems.add("bytes changed that are no alias's")


def _form(alias: Any) -> tuple[Any, ...]:
    storage = alias.untyped_storage()
    return (
        *(tuple(alias.shape), alias.stride(), alias.data_ptr(), alias.element_size()),
        *(storage.data_ptr(), storage.nbytes()),
    )


def _segments() -> list[tuple[int, int]]:
    """Return the address of each segment of small tensors, and how many bytes are in use."""
    import torch

    found = []
    references = sys.getrefcount(True)
    segments = torch.cuda.memory_snapshot()
    for _ in range(
        references - sys.getrefcount(True)
    ):  # torch 2.14 takes one too many at each call
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(True))
    for one in segments:
        used = [block for block in one["blocks"] if block["state"] != "inactive"]
        if used and one["total_size"] <= LARGEST:
            end = used[-1]["address"] + used[-1]["size"]
            found.append((one["address"], end - one["address"]))
    return found


def _bytes_at(start: int, size: int, copied: bool = True) -> Any:
    import torch

    found = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=torch.uint8)
    return found.clone() if copied else found


def _clear(changed: Any, start: int, form: tuple[Any, ...]) -> None:
    """Set what an alias has to False in the bytes of a segment that changed."""
    shape, strides, address, width = form[:4]
    steps = [stride * width for stride in strides]
    last = sum((length - 1) * step for length, step in zip(shape, steps, strict=True)) + width
    if 0 not in shape and start <= address and address + last <= start + changed.numel():
        changed.as_strided((*shape, width), (*steps, 1), address - start).fill_(False)


# ---- What is called ----


def run(
    names: Collection[str], done: Collection[str], report: Callable[[dict[str, Any]], None]
) -> None:
    """Run operators, all if no names are given, without those that are done; report each."""
    import torch

    watch = Watch()
    forms = _Forms(watch)
    operators = _database()
    with warnings.catch_warnings(), watch.installed():
        warnings.simplefilter("ignore")
        for operator in operators:
            name = f"{operator.name}.{operator.variant_test_name}".rstrip(".")
            is_wanted = not names or operator.name in names or name in names
            if not is_wanted or name in done:
                continue
            report({"begin": name})
            torch.cuda.empty_cache()
            watch.problems, calls = set(), watch.calls
            for dtype in DTYPES:
                with contextlib.suppress(Exception):
                    if getattr(torch, dtype) in operator.supported_dtypes("cuda"):
                        _run_operator(operator, getattr(torch, dtype), watch, forms)
            problems = sorted(watch.problems)
            report({"name": name, "calls": watch.calls - calls, "problems": problems})


def _database() -> Any:
    """Return torch's database of operators, which needs no more of expecttest than a name."""
    try:
        import expecttest
    except ImportError:
        expecttest = types.ModuleType("expecttest")
        expecttest.TestCase = unittest.TestCase
        expecttest.assert_expected_inline = None
        sys.modules["expecttest"] = expecttest
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def _run_operator(operator: Any, dtype: Any, watch: Watch, forms: _Forms) -> None:
    import torch

    torch.manual_seed(0)
    differentiable = operator.supports_autograd and dtype.is_floating_point
    samples = []
    with contextlib.suppress(Exception):
        for sample in operator.sample_inputs("cuda", dtype, requires_grad=differentiable):
            samples.append(sample)
            if len(samples) == FIRST:
                break
    for sample in samples[: SAMPLES - 1] + samples[SAMPLES - 1 :][-1:]:
        _run_sample(operator, sample, watch, forms)


def _run_sample(operator: Any, sample: Any, watch: Watch, forms: _Forms) -> None:
    import torch
    from torch.utils import _pytree

    given = (*sample.args,), sample.kwargs
    found: Any = None
    with watch.call(), forms:
        found = operator.op(sample.input, *given[0], **given[1])
    forms.run()
    if sample.kwargs:  # the default of an argument may mean something else on a card
        with watch.call(), forms:
            operator.op(sample.input, *given[0])
        forms.run()
    results = [one for one in _pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
    roots = [one for one in results if one.requires_grad and one.layout is torch.strided]
    leaves = [
        one
        for one in _pytree.tree_leaves((sample.input, *given))
        if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    if roots and leaves:
        with watch.call(), forms:
            torch.autograd.grad(
                roots, leaves, [torch.ones_like(r) for r in roots], allow_unused=True
            )
        forms.run()
    with torch.no_grad():
        if operator.supports_out and results and len(results) == len(_pytree.tree_leaves(found)):
            for outs in _outs(results):
                out = outs[0] if isinstance(found, torch.Tensor) else tuple(outs)
                with watch.call():
                    operator.op(sample.input, *given[0], **{**given[1], "out": out})
        is_safe = operator.name not in CRASHING or sample.input.is_floating_point()
        if (
            is_safe
            and operator.inplace_variant is not None
            and isinstance(sample.input, torch.Tensor)
        ):
            fresh = sample.input.detach().clone()
            with watch.call():
                operator.inplace_variant(fresh, *given[0], **given[1])


def _outs(results: list[Any]) -> Iterator[list[Any]]:
    """Yield outputs of the right size, in another order, of another size, and empty."""
    import torch

    yield [torch.empty_like(one) for one in results]
    yield [
        torch.empty_like(one.mT.contiguous()).mT if one.dim() > 1 else torch.empty_like(one)
        for one in results
    ]
    yield [
        torch.full((OTHER_SIZE * one.element_size(),), MARK, dtype=torch.uint8, device="cuda").view(
            one.dtype
        )
        for one in results
    ]
    yield [one.new_empty(0) for one in results]


class _Forms:
    """A context that notes operators of the dispatcher; `run` calls their forms with ``out``."""

    def __init__(self, watch: Watch) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        self._watch = watch
        self._seen: set[tuple[str, Any]] = set()
        self._found: list[tuple[Any, Any, Any, Any]] = []
        noting = self._note

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
                result = func(*args, **(kwargs or {}))
                noting(func, args, kwargs or {}, result)
                return result

        self._mode = Noting

    def __enter__(self) -> None:
        self._open = self._mode()
        self._open.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        from emulated_cuda.values.operators import tensors_in

        tensors = [one for one in tensors_in(result) if one.is_cuda]
        key = (func.name(), tuple(one.dtype for one in tensors))
        if tensors and not func._schema.is_mutable and key not in self._seen:
            self._seen.add(key)
            self._found.append((func, args, kwargs, tensors))

    def run(self) -> None:
        """Call the forms with ``out`` of all operators that are new."""
        import torch

        found, self._found = self._found, []
        with torch.no_grad():
            for func, args, kwargs, results in found:
                for form in _forms_with_out(func):
                    names = [one.name for one in form._schema.arguments if one.is_out]
                    known = {one.name for one in form._schema.arguments}
                    given = {key: value for key, value in kwargs.items() if key in known}
                    for outs in _outs(results):
                        with self._watch.call():
                            form(*args, **given, **dict(zip(names, outs, strict=True)))


def _forms_with_out(func: Any) -> Iterator[Any]:
    """Yield the forms of an operator that write into ``out`` and have a kernel for CUDA."""
    import torch

    wanted = [one.name for one in func._schema.arguments if not one.kwarg_only]
    for overload in func.overloadpacket.overloads():
        form = getattr(func.overloadpacket, overload)
        plain = [one.name for one in form._schema.arguments if not one.kwarg_only]
        outs = [one for one in form._schema.arguments if one.is_out]
        if (
            outs
            and plain == wanted
            and torch._C._dispatch_has_kernel_for_dispatch_key(form.name(), "CUDA")
        ):
            yield form


# ---- All operators, in processes that may crash ----


def sweep(names: list[str]) -> int:
    """Run operators in other processes, print what broke the rule, and return how many did."""
    results: dict[str, Any] = {}
    while True:
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps([names, sorted(results)])],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        begun = None
        for line in process.stdout or ():
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            begun = row.get("begin", begun)
            if "name" in row:
                results[row["name"]] = row
                if row["problems"]:
                    print(row["name"], *row["problems"], sep="\n    ", flush=True)
        code = process.wait()
        if code == 0:
            break
        if begun is None or begun in results:
            raise SystemExit(f"the process ended with {code}")
        results[begun] = {"name": begun, "calls": 0, "problems": [f"ended with {code}"]}
        print(begun, results[begun]["problems"][0], sep="\n    ", flush=True)
    bad = [name for name, row in results.items() if row["problems"]]
    calls = sum(row["calls"] for row in results.values())
    print(f"{len(results)} operators, {calls} calls; {len(bad)} operators break the rule")
    return len(bad)


def main() -> None:
    """Run the operators that the command line names."""
    if sys.argv[1:2] == ["--worker"]:
        import emulated_cuda

        emulated_cuda.load("h100")
        import torch

        torch.set_num_threads(1)
        wanted, done = json.loads(sys.argv[2])
        run(wanted, set(done), lambda row: print(json.dumps(row), flush=True))
    else:
        raise SystemExit(min(sweep(sys.argv[1:]), 1))


if __name__ == "__main__":
    main()
