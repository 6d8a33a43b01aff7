"""Computes kernels of Triton, and so of ``torch.compile``, from Triton's own intermediate code.

Triton compiles each kernel as for a card. The first stage of that is text in TTIR, with types
and constants resolved, which is read (:mod:`.parser`) and run with torch on the CPU for many
programs of a launch at once (:mod:`.programs`). The table in :mod:`.ttir` says what computes each
operation; the modules with the operations add its rows.

This module itself has every name of Triton that the emulated device replaces; none of them is
public. It does not import Triton: its functions are called when the program has imported it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

MODULE = "triton"
TEXT = "ttir"
"""The stage of Triton's compiler whose text is run."""
BINARY = "cubin"
LOAD = "_init_handles"
"""The method of a compiled kernel that loads its cubin, if that was not done."""
MEASURE = "_bench"
"""The method of the autotuner that measures one configuration."""


def note_compiled(function: Callable[[bytes, str], None]) -> None:
    """Call a function for each kernel that is compiled, read from Triton's cache, or loaded.

    Kernels that Inductor's workers have compiled are only loaded: they were created in another
    process, and pickled.

    Args:
        function: gets the cubin and the text in TTIR.
    """
    from triton.compiler.compiler import CompiledKernel

    create, load = CompiledKernel.__init__, getattr(CompiledKernel, LOAD)

    def note(kernel: Any) -> None:
        if TEXT in kernel.asm and BINARY in kernel.asm:
            function(kernel.asm[BINARY], kernel.asm[TEXT])

    @wraps(create)
    def create_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        note(self)

    @wraps(load)
    def note_and_load(self: Any) -> None:
        if self.module is None:
            note(self)
        load(self)

    CompiledKernel.__init__ = create_and_note
    setattr(CompiledKernel, LOAD, note_and_load)


def choose_first_valid(without_effect: Callable[[], AbstractContextManager[None]]) -> None:
    """Let the autotuner take the first configuration that this card can run.

    Others are not compiled. No memory is allocated for it, so figures of memory do not depend on
    whether a configuration was chosen before.

    Args:
        without_effect: returns a context in which launches do nothing.
    """
    from triton.runtime.autotuner import Autotuner

    run, bench = Autotuner.run, getattr(Autotuner, MEASURE)
    state = threading.local()

    def launch_once(call: Callable[[], None], *args: Any, **kwargs: Any) -> list[float]:
        with without_effect():
            call()
        return [1.0] * 3

    @wraps(run)
    def run_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, state.is_found = getattr(state, "is_found", False), False
        try:
            return run(self, *args, **kwargs)
        finally:
            state.is_found = before

    @wraps(bench)
    def bench_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        if state.is_found:
            return [math.inf] * 3
        # The hooks copy what the kernel changes.
        replaced = {"do_bench": launch_once, "pre_hook": _nothing, "post_hook": _nothing}
        before = {name: vars(self)[name] for name in replaced if name in vars(self)}
        vars(self).update(replaced)
        try:
            timings = bench(self, *args, **kwargs)
        finally:
            for name in replaced:
                vars(self).pop(name, None)
            vars(self).update(before)
        state.is_found = timings[0] != math.inf
        return timings

    Autotuner.run = run_anew
    setattr(Autotuner, MEASURE, bench_once)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a hook."""
