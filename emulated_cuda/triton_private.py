"""Every name of Triton that the emulated device replaces; none of them is public.

Nothing here imports Triton by itself: its functions are called when the program has imported it.
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
MEASURE = "_bench"
"""The method of the autotuner that measures one configuration."""


def note_compiled(function: Callable[[bytes, str], None]) -> None:
    """Call a function for each kernel that is compiled, or read from Triton's cache.

    Args:
        function: gets the cubin and the text in TTIR.
    """
    from triton.compiler.compiler import CompiledKernel

    create = CompiledKernel.__init__

    @wraps(create)
    def create_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        if TEXT in self.asm and BINARY in self.asm:
            function(self.asm[BINARY], self.asm[TEXT])

    CompiledKernel.__init__ = create_and_note


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
