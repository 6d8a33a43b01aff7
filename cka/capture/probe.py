"""Run a model on fewer samples and fewer tokens, to see which axes of its outputs change.

Each comparison is of two runs that differ in one size only. So an axis is identified even if the
batch has as many samples as tokens, channels or pixels. A run has two or three samples, and only
the shapes of its outputs are kept.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from cka.capture import Call
from cka.capture.axes import Probed, Shape
from cka.capture.outputs import OutputReader, TokenMask
from cka.errors import CKAError, InputError

Change: TypeAlias = Callable[[str, Tensor], Tensor]
Intercept: TypeAlias = Callable[[Change], Any]
"""Context manager in which a model gets changed inputs."""

POSITIONS = "positions"
"""The name of positions if no mask is given, for pooling: tokens, or pixels of images."""

_MOST_FAILURES = 10
_MAIN_INPUTS = ("input_ids", "inputs_embeds", "src", "input", "x")
_COMPANIONS = ("token_type_ids", "position_ids")
_DECODER = ("decoder_", "tgt", "labels")


class InputOf(NamedTuple):
    """One tensor that the model gets."""

    name: str
    shape: Shape
    samples_axis: int | None
    is_floating: bool

    def axes_of_size(self, size: int) -> list[int]:
        """Return the axes that may have that many tokens."""
        others = range(len(self.shape))
        return [at for at in others if at != self.samples_axis and self.shape[at] == size]


class Prober:
    """Probes one model with the inputs of one batch."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        reader: OutputReader,
        run: Callable[[], Any],
        intercept: Intercept,
        axis_of: Callable[[str, Tensor], int | None],
    ) -> None:
        """Prepare the runs.

        Args:
            modules: the modules whose outputs are compared, by name.
            reader: selects the tensor of an output.
            run: runs the model on the batch.
            intercept: a context manager in which a function changes what the model gets.
            axis_of: which axis of an input may have the samples.
        """
        self._modules = modules
        self._reader = reader
        self._run = run
        self._intercept = intercept
        self._axis_of = axis_of
        self._inputs: list[InputOf] = []
        self.was_cut = False
        """Whether an input had the samples in an axis, so that the model was run on fewer."""

    def probe(
        self, samples: int, masks: Mapping[str, TokenMask | None], *, positions: bool
    ) -> Probed:
        """Return the shapes of the runs.

        Args:
            samples: number n of samples in the batch.
            masks: the tokens whose axes are needed, by the name of their input.
            positions: whether positions are needed without a mask.

        Raises:
            InputError: if a mask may belong to several inputs.
        """
        fewer = 2 if samples > 2 or samples == 1 else 3
        probed = Probed(samples, fewer)
        index = list(range(min(samples, fewer))) + [0] * max(0, fewer - samples)

        def cut_samples(name: str, tensor: Tensor) -> Tensor:
            axis = self._axis_of(name, tensor)
            self._inputs.append(
                InputOf(name, tuple(tensor.shape), axis, tensor.is_floating_point())
            )
            # Copies, because a model may change its input in place.
            if axis is None or tensor.shape[axis] != samples:
                return tensor.clone()
            self.was_cut = True
            return tensor.index_select(axis, torch.tensor(index, device=tensor.device))

        shapes, problem = self._shapes(cut_samples)
        if shapes is None or not self.was_cut:
            probed.problem = problem or f"no input has {samples} samples"
            probed.problems = dict.fromkeys(masks, probed.problem)
            return probed
        probed.shapes = shapes
        for name, mask in masks.items():
            self._probe_tokens(probed, cut_samples, name, mask)
        if positions and not masks:
            self._probe_positions(probed, cut_samples)
        return probed

    def _probe_tokens(
        self, probed: Probed, cut_samples: Change, name: str, mask: TokenMask | None
    ) -> None:
        if mask is None or mask.count < 2:
            return
        plans = list(self._plans(name, mask))
        problem = f"no input of the model has {mask.count} tokens"
        alternatives: list[tuple[dict[str, list[int]], int, dict[Call, Shape]]] = []
        for is_sure, plan in plans[:_MOST_FAILURES]:
            if is_sure and alternatives:
                break
            for fewer in dict.fromkeys((_half(mask.count), mask.count - 1)):
                shapes, failed = self._shapes(_cut_tokens(cut_samples, plan, fewer))
                problem = failed or problem
                if shapes is None:
                    continue
                alternatives.append((plan, fewer, shapes))
                break
        if not alternatives:
            probed.problems[name] = problem
            return
        if len(alternatives) > 1:
            inputs = [next(iter(plan)) for plan, _, _ in alternatives]
            raise InputError(
                f"{mask.name} has {mask.count} tokens, but so do several inputs of the model "
                f"({' and '.join(map(repr, inputs))}); name the input to which the mask belongs, "
                f"e.g. mask={{{inputs[0]!r}: ...}}"
            )
        _, fewer, shapes = alternatives[0]
        probed.tokens[name] = (mask.count, fewer, shapes)

    def _plans(self, name: str, mask: TokenMask) -> Iterator[tuple[bool, dict[str, list[int]]]]:
        """Yield which axes of which inputs may be cut for a mask, and whether that is certain."""
        fitting = {
            each.name: each
            for each in self._inputs
            if each.samples_axis is not None and each.axes_of_size(mask.count)
        }
        own = {
            each for each in fitting if each == mask.name or each.rpartition(".")[2] == mask.name
        }
        is_decoder = name == "decoder"
        candidates = [each for each in fitting if _last(each).startswith(_DECODER) == is_decoder]
        inputs = [each for each in candidates if each not in own and "mask" not in each]
        if name in fitting:
            main = [each for each in candidates if each == name or each.startswith(f"{name}_")]
        elif is_decoder:
            main = inputs
        else:
            main = [each for each in inputs if _last(each) in (*_MAIN_INPUTS, *_COMPANIONS)]
            main = main or [each for each in inputs if mask.name.startswith(f"{_last(each)}_")]
        masks = [each for each in candidates if "mask" in each and each not in own]
        if main or len(inputs) <= 1:
            narrow = main or inputs
            for chosen in ([*narrow, *own], [*narrow, *own, *masks], [*candidates, *own]):
                yield from self._variants(True, chosen, fitting, mask.count)
            return
        for single in inputs:
            yield from self._variants(False, [single, *own], fitting, mask.count)
        yield from self._variants(True, [*candidates, *own], fitting, mask.count)

    def _variants(
        self, is_sure: bool, names: Sequence[str], fitting: Mapping[str, InputOf], tokens: int
    ) -> Iterator[tuple[bool, dict[str, list[int]]]]:
        """Yield the ways to cut inputs, of which several axes may have that many tokens."""
        names = list(dict.fromkeys(names))
        if not names:
            return
        of_names = [fitting[name].axes_of_size(tokens) for name in names]
        choices = [
            [axes] if len(axes) == 1 or "mask" in name else [[at] for at in axes]
            for name, axes in zip(names, of_names, strict=True)
        ]
        for choice in list(product(*choices))[:3]:
            yield is_sure, dict(zip(names, choice, strict=True))

    def _probe_positions(self, probed: Probed, cut_samples: Change) -> None:
        """Run on fewer positions of all inputs together."""
        for axes_of in (_usual_positions, _other_positions):
            plan = {
                each.name: axes
                for each in self._inputs
                if each.samples_axis is not None
                and (axes := [at for at in axes_of(each) if each.shape[at] > 1])
            }
            if not plan:
                continue
            for size in (_half, lambda tokens: tokens - 1):

                def cut(
                    name: str,
                    tensor: Tensor,
                    plan: dict[str, list[int]] = plan,
                    size: Callable[[int], int] = size,
                ) -> Tensor:
                    tensor = cut_samples(name, tensor)
                    for axis in plan.get(name, ()):
                        tensor = tensor.narrow(axis, 0, size(tensor.shape[axis]))
                    return tensor

                shapes, failed = self._shapes(cut)
                if shapes is not None:
                    probed.tokens[POSITIONS] = (-1, -1, shapes)
                    return
                probed.problems[POSITIONS] = failed

    def _shapes(self, change: Change) -> tuple[dict[Call, Shape] | None, str]:
        """Return the shapes of all outputs if the model gets changed inputs, or why it raises."""
        shapes: dict[Call, Shape] = {}
        calls: Counter[str] = Counter()

        def hook(name: str, module: nn.Module, args: Any, output: Any) -> None:
            call = Call(name, calls[name])
            calls[name] += 1
            tensor = self._reader.find(call.name, output)
            if tensor is not None and not tensor.is_nested:
                shapes[call] = tuple(tensor.shape)

        handles = []
        inputs = self._inputs
        try:
            for name, module in self._modules.items():
                if not isinstance(module, torch.jit.ScriptModule):
                    handles.append(module.register_forward_hook(partial(hook, name)))
            self._inputs = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with self._intercept(change):
                    self._run()
        except CKAError:
            raise
        except Exception as error:  # whatever a user's model raises for sizes that it cannot have
            self._inputs = inputs or self._inputs
            return None, f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        finally:
            for handle in handles:
                handle.remove()
        self._inputs = inputs or self._inputs
        return shapes, ""


def _cut_tokens(cut_samples: Change, plan: Mapping[str, list[int]], tokens: int) -> Change:
    def cut(name: str, tensor: Tensor) -> Tensor:
        tensor = cut_samples(name, tensor)
        for axis in plan.get(name, ()):
            tensor = tensor.narrow(axis, 0, tokens)
        return tensor

    return cut


def _half(tokens: int) -> int:
    return tokens // 2 if tokens > 3 else tokens - 1


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _usual_positions(each: InputOf) -> list[int]:
    """Return the axes of tokens (n, t), (n, t, d) or of pixels (n, c, h, w)."""
    axes = [at for at in range(len(each.shape)) if at != each.samples_axis]
    if len(axes) == 1:
        return [] if each.is_floating else axes
    return axes[:1] if len(axes) == 2 else axes[1:]


def _other_positions(each: InputOf) -> list[int]:
    """Return the axes of positions if those of features are on the other side."""
    axes = [at for at in range(len(each.shape)) if at != each.samples_axis]
    if len(axes) == 1:
        return axes
    return axes[1:] if len(axes) == 2 else axes[:-1]


@contextmanager
def changed_inputs(model: nn.Module, change: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Change what a model gets, in every call of it.

    Args:
        model: the model.
        change: a function of positional and keyword arguments that returns both, or None to leave
            them as they are.
    """
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: change(args, kwargs), with_kwargs=True
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random numbers of the CPU and of a device afterwards."""
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices, device_type=kind):
        yield
