"""Kernels that run torch's CUDA operator and then compute its result on the CPU.

Where the library cannot run the operator, the CPU's result is put into memory of the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from emulated_cuda import torch_private, values
from emulated_cuda.errors import WITHOUT_VALUES
from emulated_cuda.values import (
    device_assert,
    graphs,
    is_assert,
    is_unsupported,
    on_cpu,
    operators,
    own_output,
    replace,
    staleness,
    upload,
    write,
)
from emulated_cuda.values.operators import Kernel, Unavailable, tensors_in, thread

LOW = (
    torch.float16,
    torch.bfloat16,
    *tuple(dtype for name, dtype in vars(torch).items() if name.startswith("float8_")),
)
"""Types for which the CPU lacks some operators."""


def instead(schema: Any, compute: Kernel, args: Any, kwargs: Any) -> Any:
    """Return the CPU's result in memory of the device, without the operator's workspace."""
    device = device_of(args, kwargs)
    written = {argument.name for argument in schema.arguments if is_written(argument)}
    if not written:
        return upload(_call_on_cpu(compute, args, kwargs), device)
    names = [argument.name for argument in schema.arguments]
    outs = {argument.name for argument in schema.arguments if argument.is_out}
    targets: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prepared(key: str, value: Any) -> Any:
        if key not in written or not isinstance(value, torch.Tensor):
            return on_cpu(value)
        # An `out` starts empty: torch's operator may have failed before it resized the tensor.
        fresh = torch.empty(0, dtype=value.dtype) if key in outs else own_output(value)
        targets.append((value, fresh))
        return fresh

    new_args = [prepared(names[index], value) for index, value in enumerate(args)]
    new_kwargs = {key: prepared(key, value) for key, value in kwargs.items()}
    compute(*new_args, **new_kwargs)
    for target, value in targets:
        replace(target, value)
    outputs = [target for target, _ in targets]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def device_of(args: Any, kwargs: Any) -> torch.device:
    """Return the device of an operator's arguments; the current one if none is on a device."""
    for tensor in tensors_in((args, kwargs)):
        if tensor.is_cuda:
            return tensor.device
    return torch.device("cuda", torch.cuda.current_device())


def is_written(argument: Any) -> bool:
    """Whether an operator writes an argument, by its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _call_on_cpu(compute: Kernel, args: Any, kwargs: Any) -> Any:
    args = [on_cpu(value) for value in args]
    kwargs = {key: on_cpu(value) for key, value in kwargs.items()}
    try:
        return compute(*args, **kwargs)
    except RuntimeError as error:
        low = next((t.dtype for t in tensors_in((args, kwargs)) if t.dtype in LOW), None)
        if low is None or not is_unsupported(error):
            raise
        return _cast(compute(*_cast(args, LOW, torch.float32), **kwargs), (torch.float32,), low)


def _cast(value: Any, kinds: tuple[torch.dtype, ...], dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in kinds else value
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(item, kinds, dtype) for item in value])
    return value


_CHECKING = ("normal",)
"""Operators that check their arguments in some versions of torch, and read back the result."""

_FILLING = (
    *("fill_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_"),
    *("cauchy_", "log_normal_"),
)
"""Operators that write their first argument, whatever it was before."""

# Skipped in CPU operators that this package calls, because the user has not called them.
_SKIPPED_KEYS = (
    "AutogradCPU",
    "AutogradOther",
    "ADInplaceOrView",
    "AutocastCPU",
    "Tracer",
    "Functionalize",
)


@cache
def _skipped() -> Any:
    return torch_private.excluded_keys(_SKIPPED_KEYS)


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Hide operators called in this context from autograd, autocast and the user's modes."""
    with torch_private.without_torch_function(), torch_private.without_keys(_skipped()):
        yield


def compute_after(name: str, parts: Callable[[], tuple[Any, Kernel, Kernel]]) -> Kernel:
    """Return a kernel that runs torch's CUDA kernel and then writes what the CPU computes.

    Args:
        name: of the operator, for errors.
        parts: returns the operator of torch, its CUDA kernel, and what computes it. That gets the
            operator's arguments with CPU aliases of its tensors. Called when the operator first
            runs, because a program uses few of more than a thousand.
    """
    return _Computation(name, parts).kernel


_NOT_RUN = object()
"""In place of results if the library cannot run the CUDA operator."""

_WRITTEN: Any = object()
"""In place of what was computed once it is written into the results."""


class _Computation:
    """A CUDA operator, and what computes its values after it."""

    _original: Kernel
    _compute: Kernel
    _outs: list[str]
    _fills: bool
    _checks: bool
    _is_random: bool
    _gives_tensors: bool
    _skipped: Any

    def __init__(self, name: str, parts: Callable[[], tuple[Any, Kernel, Kernel]]) -> None:
        self._name = name
        self._parts = parts
        self._schema: Any = None

    def _prepare(self) -> None:
        operator, self._original, self._compute = self._parts()
        self._outs = names_of_outs(operator)
        base = self._name.partition("::")[2].partition(".")[0]
        self._fills = base in _FILLING
        self._checks = base in _CHECKING
        self._is_random = operators.is_random(operator)
        schema = torch_private.schema_of(operator)
        self._gives_tensors = schema.is_mutable or any(
            "Tensor" in str(returned.type) for returned in schema.returns
        )
        self._skipped = _skipped()
        self._schema = schema  # last, because another thread may call the same operator

    def kernel(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the CUDA operator, then compute its results on the CPU into the same memory."""
        if self._schema is None:
            self._prepare()
        if thread.arguments is not None:
            return self._original(keyset, *args, **kwargs)
        if graphs.is_capturing():
            return self._record(keyset, args, kwargs)
        may_be_stale = staleness.is_possible()
        if may_be_stale and not self._gives_tensors:
            staleness.check((args, kwargs))
        generator, seed, offset = self._random_state(args, kwargs)
        results = self._run(keyset, args, kwargs)
        has_checked = thread.has_checked
        # Not on_the_cpu(), which would take a microsecond more for each operator.
        with torch_private.without_torch_function(), torch_private.without_keys(self._skipped):
            compute = self._compute
            if generator is not None:
                operators.advance(generator, offset, operators.form_of(self._name, args, kwargs))
            if self._is_random:
                compute = _seeded(compute, seed)
            unknown: tuple[Any, str] | None = None
            computed = _WRITTEN
            try:
                if results is _NOT_RUN:
                    results = instead(self._schema, compute, args, kwargs)
                else:
                    computed, unknown = self._write(compute, results, args, kwargs)
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
                if results is _NOT_RUN or has_checked or torch_private.is_singular(error):
                    raise
                if may_be_stale and is_assert(error):
                    staleness.check((args, kwargs))
                unknown = _after_error(
                    self._name, self._schema, compute, args, kwargs, results, error
                )
            if computed is not _WRITTEN:
                if may_be_stale:
                    staleness.check((args, kwargs))
                results = upload(computed, device_of(args, kwargs))
        if may_be_stale:
            self._propagate(results, args, kwargs)
        if unknown is not None:
            staleness.mark(*unknown)
        return results

    def _record(self, keyset: Any, args: Any, kwargs: Any) -> Any:
        """Run the CUDA operator in a capture; a replay computes it with the same memory.

        Raises:
            RuntimeError: if a graph cannot have it.
        """
        generator = operators.generator_of(args, kwargs) if self._is_random else None
        draw = None
        if generator is not None:
            form = operators.form_of(self._name, args, kwargs)
            draw = operators.Draw(generator.graphsafe_get_state(), form)
        results = self._run(keyset, args, kwargs)
        if results is _NOT_RUN:
            graphs.refuse(self._name)
        mutated = _mutated(self._schema, args, kwargs)
        reads, writes = (args, kwargs), (results, mutated)
        with on_the_cpu():
            # Aliases keep no memory alive, as a graph keeps none.
            targets = on_cpu(results)
            cpu_args = [on_cpu(value) for value in args]
            named = {key: on_cpu(value) for key, value in kwargs.items()}

        def compute(seed: int) -> None:
            compute = self._compute if draw is None else _seeded(self._compute, seed)
            with on_the_cpu():
                self._repeat(compute, targets, cpu_args, named)

        graphs.record(compute, reads, writes, draw=draw)
        return results

    def _repeat(self, compute: Kernel, results: Any, args: Any, kwargs: Any) -> None:
        """Compute the operator again into the same results.

        Raises:
            DeviceAssertError: if a kernel would refuse a value.
            RuntimeError: if the CPU cannot compute it.
        """
        try:
            computed, unknown = self._write(compute, results, args, kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
            unknown = _after_error(self._name, self._schema, compute, args, kwargs, results, error)
            computed = _WRITTEN
        if unknown is not None:
            raise RuntimeError(unknown[1])
        if computed is not _WRITTEN:
            raise RuntimeError(f"cannot replay {self._name}: the result's shape depends on values")

    def _random_state(self, args: Any, kwargs: Any) -> tuple[Any, int, int]:
        """Return the operator's generator, if any, its seed and its offset before the operator."""
        generator = operators.generator_of(args, kwargs) if self._is_random else None
        if generator is None:
            return None, 0, 0
        return generator, operators.seed_of(generator), generator.get_offset()

    def _run(self, keyset: Any, args: Any, kwargs: Any) -> Any:
        """Run torch's CUDA kernel, which allocates as on a card."""
        try:
            return operators.run(self._original, keyset, args, kwargs, checks_pass=self._checks)
        except Unavailable:  # not kept: its traceback would keep the arguments
            return _NOT_RUN

    def _write(
        self, compute: Kernel, results: Any, args: Any, kwargs: Any
    ) -> tuple[Any, tuple[Any, str] | None]:
        """Compute values and write them into the results.

        Returns:
            What was computed if its form depends on values, so that it cannot be written; then
            None, or which results have no value and why.
        """
        outs = [name for name in self._outs if kwargs.get(name) is not None]
        cpu_kwargs = {
            key: own_output(value) if key in outs else on_cpu(value)
            for key, value in kwargs.items()
        }
        computed = compute(*[on_cpu(value) for value in args], **cpu_kwargs)
        if outs:  # not what it returns: some operators on lists return nothing
            results, computed = [kwargs[name] for name in outs], [cpu_kwargs[name] for name in outs]
        try:
            unwritten = write(results, computed)
        except values.FormError:
            return computed, None
        except values.ShapeError as error:
            return _WRITTEN, (results, f"{self._name} was not computed: {error}")
        if not unwritten:
            return _WRITTEN, None
        return _WRITTEN, (unwritten, reason(self._name, "the CPU has no such result"))

    def _propagate(self, results: Any, args: Any, kwargs: Any) -> None:
        """Mark what was computed from stale values as stale."""
        read = (
            args[1:] if self._fills else args,
            {key: value for key, value in kwargs.items() if key not in self._outs},
        )
        written = results, _mutated(self._schema, args, kwargs)
        staleness.propagate(read, written, arguments=(args, kwargs))


def _seeded(compute: Kernel, seed: int) -> Kernel:
    return lambda *args, **kwargs: operators.seeded(compute, seed, args, kwargs)


# ---- Where the CPU has no such operator ----


def _after_error(
    name: str,
    schema: Any,
    compute: Kernel,
    args: Any,
    kwargs: Any,
    results: Any,
    error: Exception,
) -> tuple[Any, str] | None:
    """Compute in single precision, or raise what a card would raise.

    Returns:
        The tensors that have no value, and why; None if all have been computed.
    """
    why = str(error)
    if not is_unsupported(error):
        # Raised without a name for it here: that would keep this frame, and so the arguments.
        if is_assert(error):
            raise device_assert(name, error) from error
    elif any(tensor.dtype in LOW for tensor in tensors_in((args, kwargs))):
        try:
            _compute_in_single_precision(schema, compute, args, kwargs, results)
        except (RuntimeError, IndexError, ValueError, TypeError) as second:
            why = str(second)
        else:
            return None
    unknown = results, _mutated(schema, args, kwargs)
    if not any(True for _ in tensors_in(unknown)):  # no later read could raise
        raise device_assert(name, error) from error
    return unknown, reason(name, why)


def reason(name: str, why: str) -> str:
    """Return the text of the error for a value that an operator should have written."""
    return (
        f"the emulated device did not compute {name} ({why.splitlines()[0]}), so the value that "
        f"is read is not known; call {name} on the CPU, or use a GPU. To measure memory only, "
        f"{WITHOUT_VALUES}"
    )


def _compute_in_single_precision(
    schema: Any, compute: Kernel, args: Any, kwargs: Any, results: Any
) -> None:
    def widened(value: Any) -> Any:
        value = on_cpu(value)
        if isinstance(value, torch.Tensor):
            return value.float() if value.dtype in LOW else value
        if isinstance(value, list):
            return [widened(item) for item in value]
        return torch.float32 if value in LOW else value

    outs = {argument.name for argument in schema.arguments if argument.is_out}
    wide_args = [widened(value) for value in args]
    wide_kwargs = {
        key: widened(own_output(value) if key in outs else value) for key, value in kwargs.items()
    }
    computed = compute(*wide_args, **wide_kwargs)
    pairs = zip(
        _mutated(schema, args, kwargs), _mutated(schema, wide_args, wide_kwargs), strict=True
    )
    for target, value in pairs:
        write(target, value)
    write(results, computed)


def _mutated(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operator writes."""
    mutated = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if value is not None:
                mutated.append(value)
    return mutated


# ---- Other kernels ----


def names_of_outs(operator: Any) -> list[str]:
    """Return the names of the arguments into which an operator writes its results."""
    arguments = torch_private.schema_of(operator).arguments
    return [argument.name for argument in arguments if argument.kwarg_only and is_written(argument)]


def not_computed(name: str, operator: Any, original: Kernel, why: str) -> Kernel:
    """Return a kernel that runs `original` and marks its results as not computed."""
    schema = torch_private.schema_of(operator)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.arguments is not None:
            return original(keyset, *args, **kwargs)
        try:
            results = operators.run(original, keyset, args, kwargs)
        except Unavailable as error:
            raise RuntimeError(str(error)) from None
        staleness.mark((results, _mutated(schema, args, kwargs)), reason(name, why))
        return results

    return kernel


def compute_first(original: Kernel, compute: Callable[..., Any]) -> Kernel:
    """Return a kernel for an operator whose results are numbers, such as ``equal``."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if thread.arguments is not None:
            return original(keyset, *args, **kwargs)
        if graphs.is_capturing():
            return operators.run(original, keyset, args, kwargs)  # it reads back, which raises
        staleness.check((args, kwargs))
        operators.run(original, keyset, args, kwargs)
        with on_the_cpu():
            return compute(*map(on_cpu, args), **{k: on_cpu(v) for k, v in kwargs.items()})

    return kernel
