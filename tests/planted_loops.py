"""Loops that keep, replace or leave memory as the users of other projects have reported it.

As a program, it prints what torch itself says of each, without the plugin: its counters on a card,
or with the argument ``cpu`` its profiler.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from garbage_programs import BATCHES, SIZE, STEPS, no_automatic_collections, run
from growth_programs import random_parts
from torch.nn.functional import cross_entropy

Loop = Callable[[Iterable[torch.Tensor]], None]
WIDTH = 64
SEEDS = range(8)


def _model(like: torch.Tensor) -> torch.nn.Module:
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)
    return torch.nn.Sequential(*layers).to(like.device)


def _rows(value: torch.Tensor) -> torch.Tensor:
    return value.view(-1, WIDTH)


def running_mean_of_losses(values: Iterable[torch.Tensor]) -> None:
    """Let a running mean reference the graph of every step."""
    model, mean = None, None
    for value in values:
        model = model or _model(value)
        loss = model(_rows(value)).square().mean()
        mean = loss if mean is None else 0.9 * mean + 0.1 * loss


def log_of_losses(values: Iterable[torch.Tensor]) -> None:
    """Keep losses with their graphs in a list of a mapping, and train."""
    model, log = None, {}
    for value in values:
        model = model or _model(value)
        loss = model(_rows(value)).square().mean()
        loss.backward()
        model.zero_grad()
        log.setdefault("train/loss", []).append(loss)


class _StoresInputs:
    """Keeps the inputs of a layer, as code that explains predictions does."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self.stored: list[Any] = []
        self.handle = layer.register_forward_pre_hook(self.store)

    def store(self, layer: torch.nn.Module, inputs: Any) -> None:
        self.stored.append(inputs)


def inputs_stored_by_hooks(values: Iterable[torch.Tensor]) -> None:
    """Keep the input of a layer in an object that is kept after its hook is removed."""
    model, rules = None, []
    for value in values:
        model = model or _model(value)
        rules.append(_StoresInputs(model[2]))
        model(_rows(value))
        rules[-1].handle.remove()


def logits_in_float(values: Iterable[torch.Tensor]) -> None:
    """Copy all logits to another type for the last of them."""
    head = None
    for value in values:
        head = head or torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False).to(
            value.device, torch.bfloat16
        )
        with torch.no_grad():
            logits = head(_rows(value).to(torch.bfloat16))
            logits.float()[-1].argmax()


def last_logits_while_the_next_are_computed(values: Iterable[torch.Tensor]) -> None:
    """Reference the logits of a step until those of the next replace them."""
    head = None
    for value in values:
        head = head or torch.nn.Linear(WIDTH, 4 * WIDTH).to(value.device)
        logits = head(_rows(value))
        targets = torch.zeros(len(logits), dtype=torch.long, device=value.device)
        cross_entropy(logits, targets).backward()


def chunks_and_their_copy(values: Iterable[torch.Tensor]) -> None:
    """Join a list of chunks, which are live beside the result."""
    for value in values:
        torch.cat([value * number for number in range(4)])


def sum_of_the_losses_of_micro_batches(values: Iterable[torch.Tensor]) -> None:
    """Keep the graphs of all micro batches until one backward pass."""
    model, total = None, 0
    for value in values:
        model = model or _model(value)
        total = total + model(_rows(value)).square().mean()
    total.backward()


def outputs_of_micro_batches(values: Iterable[torch.Tensor]) -> None:
    """Keep a statistic of each micro batch with its graph."""
    model, outputs = None, []
    for value in values:
        model = model or _model(value)
        output = model(_rows(value))
        output.square().mean().backward()
        outputs.append({"entropy": output.sum(-1)})


class _Registry:
    """Keeps the models and optimizers that it prepares, until it is asked to forget them."""

    def __init__(self) -> None:
        self.prepared: list[Any] = []

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        self.prepared += objects
        return objects


def models_of_one_registry(values: Iterable[torch.Tensor], forgets: bool = False) -> None:
    """Train one small model after the other, all of them prepared by the same object."""
    registry = _Registry()
    for value in values:
        model = _model(value)
        model, optimizer = registry.prepare(model, torch.optim.Adam(model.parameters()))
        model(_rows(value)).mean().backward()
        optimizer.step()
        if forgets:
            registry.prepared.clear()


class _Results(dict[str, Any]):
    """A mapping that references itself, into which a model writes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.whole = self


def results_written_into_the_input(values: Iterable[torch.Tensor]) -> None:
    """Train a model that writes its results into the mapping that has its input."""
    model = None
    for value in values:
        if model is None:
            model = _model(value)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        results = _Results(hidden=_rows(value))
        for layer in model:
            results["hidden"] = layer(results["hidden"])
        results["out"] = results["hidden"].sum(-1)
        results["out"].mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def results_cached_by_model(values: Iterable[torch.Tensor]) -> None:
    """Keep a result of each model in a mapping that has the model as its key."""
    cache = {}
    for value in values:
        model = _model(value)
        with torch.no_grad():
            cache[model, "anchors"] = model(_rows(value))


def kept_by_a_default_argument(values: Iterable[torch.Tensor]) -> None:
    """Append to the list that is the default of an argument."""

    def keep(value: torch.Tensor, kept: list[torch.Tensor] = []) -> None:  # noqa: B006
        kept.append(value + 1)

    for value in values:
        keep(value)


def kept_as(values: Iterable[torch.Tensor], form: str) -> None:
    """Keep the result of each step with its graph, detached, or only the input of the step."""
    model, kept = None, []
    for value in values:
        model = model or _model(value).requires_grad_(False)
        inputs = _rows(value).clone().requires_grad_()
        output = model(inputs)
        output.sum().backward()
        kept.append({"graph": output, "detached": output.detach(), "input": inputs}[form])


def python_objects(values: Iterable[torch.Tensor]) -> None:
    """Keep numbers of Python, which are no memory of a tensor."""
    log = []
    for value in values:
        log.append([float(number) for number in range(len(value))])


def pinned_copies(values: Iterable[torch.Tensor]) -> None:
    """Keep a pinned copy of each batch on the host of a card."""
    kept = [value.cpu().pin_memory() if value.is_cuda else value.clone() for value in values]
    del kept


def random_loop(values: Iterable[torch.Tensor], seed: int) -> None:
    """Run parts that are chosen by a seed; see ``growth_programs``."""
    parts = None
    for batch, value in enumerate(values):
        parts = parts or random_parts(seed, BATCHES, str(value.device))
        for part in parts:
            part.run(batch)


LOOPS: dict[str, Loop] = {
    **{
        loop.__name__: loop
        for loop in (
            *(running_mean_of_losses, log_of_losses, inputs_stored_by_hooks, logits_in_float),
            *(last_logits_while_the_next_are_computed, chunks_and_their_copy),
            *(sum_of_the_losses_of_micro_batches, outputs_of_micro_batches),
            *(models_of_one_registry, results_written_into_the_input, results_cached_by_model),
            *(kept_by_a_default_argument, python_objects, pinned_copies),
        )
    },
    "models_of_a_registry_that_forgets": partial(models_of_one_registry, forgets=True),
    **{f"kept_as_{form}": partial(kept_as, form=form) for form in ("graph", "detached", "input")},
    **{step.__name__: partial(run, step) for step in STEPS},
    **{f"random_{seed}": partial(random_loop, seed=seed) for seed in SEEDS},
}
"""By their names."""


def noting(
    values: Iterable[torch.Tensor], level: Callable[[], int], levels: list[int]
) -> Iterator[torch.Tensor]:
    """Yield values, and note the level whenever the loop has ended a batch."""
    boxes = map(lambda value: [value], values)  # noqa: C417  # this frame must keep no value
    for box in boxes:
        yield box.pop()
        levels.append(level())


def on_card(
    loop: Loop, device: torch.device, run_loop: Callable[[Iterator[torch.Tensor]], None]
) -> dict[str, Any]:
    """Run a loop on a card; return what torch's own counters say of it, in bytes.

    The caller keeps the collector from running by itself.

    Args:
        loop: runs once before, for what torch makes once.
        device: the card.
        run_loop: runs the loop over batches.
    """
    values = [torch.ones(SIZE, device=device)] * BATCHES
    loop(values)
    gc.collect()
    levels: list[int] = []
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    run_loop(noting(values, torch.cuda.memory_allocated, levels))
    peak = torch.cuda.max_memory_allocated() - start[0]
    reserve = torch.cuda.max_memory_reserved() - start[1]
    return {"peak": peak, "reserve": reserve, "levels": [level - start[0] for level in levels]}


def in_profiler(loop: Loop) -> dict[str, Any]:
    """Run a loop on the CPU; return the peak and the levels that follow from torch's profiler.

    It records each allocation and each release of torch's allocator, in bytes.
    """
    values = [torch.ones(SIZE)] * BATCHES
    loop(values)
    gc.collect()

    def note_end() -> int:
        with torch.profiler.record_function(_BATCH_ENDS):
            return 0

    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler:
        loop(noting(values, note_end, []))
    events = [
        (event.start_ns(), event.nbytes() if event.name() == _MEMORY else None)
        for event in profiler.profiler.kineto_results.events()
        if event.name() in (_MEMORY, _BATCH_ENDS)
    ]
    level, peak, levels = 0, 0, []
    for _, change in sorted(events, key=lambda event: event[0]):
        if change is None:
            levels.append(level)
        else:
            level += change
            peak = max(peak, level)
    return {"peak": peak, "levels": levels}


_BATCH_ENDS, _MEMORY = "a batch ends", "[memory]"
"""Names of events of the profiler."""


def main() -> None:
    """Print the figures of all loops as JSON, in the last line."""
    device = torch.device("cuda")
    on_cpu = sys.argv[1:] == ["cpu"]
    if on_cpu:
        torch.set_num_threads(1)  # the temporaries of operators depend on it
    with no_automatic_collections():
        found = {
            name: in_profiler(loop) if on_cpu else on_card(loop, device, loop)
            for name, loop in LOOPS.items()
        }
    assert "pytest_cka_memory" not in sys.modules
    print(json.dumps(found))


if __name__ == "__main__":
    main()
