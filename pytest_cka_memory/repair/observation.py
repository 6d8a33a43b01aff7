"""What a run of the step as it is shows: modules, optimizers, losses, and what depends on them."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pytest_cka_memory.meters.torch_keepers import is_compiled
from pytest_cka_memory.meters.torch_private import has_forward_hooks
from pytest_cka_memory.repair import Site, calling_site, calls_directly
from pytest_cka_memory.repair.proof import Loss, Mixing, is_training, loss_of, numbers_of_parts
from pytest_cka_memory.repair.smaller import Sizes
from pytest_cka_memory.repair.trials import calls_followed, class_of, replaced, tensors_in
from pytest_cka_memory.repair.users_code import UntilStep, UnusedLocals, random_state, side_effect

_IN_PLACE = (torch.nn.ReLU, torch.nn.SiLU, torch.nn.ELU, torch.nn.LeakyReLU, torch.nn.ReLU6)
"""Activations that take ``inplace``."""
_OF_BATCH = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
)
_DROPOUT = (
    *(torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d),
    *(torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout),
)

_LEAST_TOKENS = 64


@dataclass
class Root:
    """A module that the step calls directly: a model. Holds no tensor of it."""

    kind: type[torch.nn.Module]
    made_at: Site | None
    called_at: Site | None
    has_parameters: bool = False
    has_gradients: bool = False
    """Whether a backward pass reached what it returned."""
    needs_gradients: bool = False
    """Whether what it returned requires gradients."""
    calls: "dict[Site | None, bool]" = field(default_factory=dict)
    """Where it was called and returned what requires gradients -> whether a backward pass reached
    what it returned there."""
    returns_scalar: bool = False
    numbers_of_parts: str = ""
    """How the mean over equal parts of a batch differs from the scalar; empty if it does not."""
    takes_floats: bool = False
    """Whether it is called with floating-point tensors."""
    batch_size: int = 0
    """The first size of all its arguments; 0 if they are not all tensors of one such size."""
    classes: "Counter[type[torch.nn.Module]]" = field(default_factory=Counter)
    """Class -> how many modules of it are in the model."""
    nested: "dict[type[torch.nn.Module], set[type[torch.nn.Module]]]" = field(default_factory=dict)
    """Class -> the classes of the modules that contain one of it."""
    positions: "dict[type[torch.nn.Module], list[int]]" = field(default_factory=dict)
    """Class -> the numbers of its modules among those of its class, in the order of their calls."""
    saved_bytes: "dict[type[torch.nn.Module], list[int]]" = field(default_factory=dict)
    """Class -> what each of its modules has saved for backward, in the order of their calls."""


@dataclass
class Observed:
    """What one run has shown; plain facts and sites."""

    device: str = "cpu"
    has_values: bool = True
    """Whether the device computes values: an emulated one may not."""
    cards: int = 1
    """How many cards are emulated: the step may be spread over them."""
    is_distributed: bool = False
    """Whether a process group exists while models run."""
    state_bytes: int = 0
    """Of one state for each parameter that the optimizers step."""
    roots: list[Root] = field(default_factory=list)
    side_effects: dict[type[torch.nn.Module], str] = field(default_factory=dict)
    """Class of a module -> what its forward does that happens again if it runs again."""
    batch_statistics: str = ""
    """The class of a batch norm that was called in training; empty if there is none."""
    has_dropout: bool = False
    optimizers: dict[type[torch.optim.Optimizer], Site | None] = field(default_factory=dict)
    steps: int = 0
    backward_calls: int = 0
    foreach: bool = False
    """Whether an optimizer has chosen neither ``foreach`` nor ``fused`` itself."""
    reads_gradients: bool = False
    """Whether gradients are read between backward and the optimizer's step, as to clip them."""
    accumulates: bool = False
    """Whether several backward passes add to one gradient."""
    is_higher_order: bool = False
    """Whether a backward pass itself is differentiated, or a graph is kept."""
    keeps_zeros: list[Site | None] = field(default_factory=list)
    """Calls of ``zero_grad(set_to_none=False)``."""
    losses: list[Loss] = field(default_factory=list)
    attention: set[torch.dtype] = field(default_factory=set)
    """The types of queries of ``scaled_dot_product_attention``; empty if it is not called."""
    own_attention: dict[Site | None, list[int]] = field(default_factory=dict)
    """Where attention weights of a graph are computed by ``softmax`` -> bytes of each call."""
    draws: bool = False
    """Whether a model draws random numbers of torch's when it is called."""
    mixing: Mixing = field(default_factory=Mixing)
    until_step: UntilStep = field(default_factory=UntilStep)
    is_autocast: bool = False
    is_compiled: bool = False
    sizes: list[Sizes] = field(default_factory=list)
    """Of the first input of each model."""
    half: bool = False
    """Whether parameters are in a type of 16 bits already."""
    activations: dict[type[torch.nn.Module], list[Site | None]] = field(default_factory=dict)
    """Class of activations that are not in place -> where they are made."""
    unused: UnusedLocals = field(default_factory=UnusedLocals)
    read_again: dict[type[torch.nn.Module], str] = field(default_factory=dict)
    """Class of activations that must not overwrite their input -> why."""


class _Functions(TorchFunctionMode):
    """Sees the calls of torch's functions that changes depend on."""

    def __init__(self, observer: "_Observer") -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        observer, kwargs = self._observer, kwargs or {}
        observer.sees(func, args, kwargs)
        result = func(*args, **kwargs)
        if observer.is_in_model:
            observer.observed.mixing.note(getattr(func, "__name__", ""), args, kwargs, result)
        return result


_GRAD = vars(torch.Tensor).get("grad", torch.Tensor.grad).__get__


class _Observer:
    """Fills in :class:`Observed` while a step runs."""

    def __init__(self) -> None:
        self.observed = Observed()
        self._made: weakref.WeakKeyDictionary[object, Site | None] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, Root] = weakref.WeakKeyDictionary()
        self._changed: list[Callable[[], str]] = []
        self._stack: list[torch.nn.Module] = []
        self._in_optimizer = 0
        self._in_backward = 0
        self._called_at: Site | None = None
        self._since_step = 0
        self._saved: list[set[tuple[int, int]]] = []
        self._random: object = None
        self._inputs: dict[int, tuple[type[torch.nn.Module], torch.Tensor]] = {}
        """Address -> the activation whose input is there, and the input."""

    @property
    def is_in_model(self) -> bool:
        """Whether a module is being called, but not by a backward pass."""
        return bool(self._stack) and not self._in_backward

    def sees(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observed = self.observed
        name = getattr(func, "__name__", "")
        self._note_reads(args)
        if kwargs.get("generator") is not None:
            for module in self._stack:
                observed.side_effects.setdefault(
                    class_of(module), "its forward draws from a torch.Generator of its own"
                )
        if not self._in_optimizer and not self._in_backward:
            observed.until_step.note(func, args)
            observed.reads_gradients |= func == _GRAD and bool(self._since_step)
        if name == "scaled_dot_product_attention":
            observed.attention.add((args[0] if args else kwargs["query"]).dtype)
        elif name == "softmax" and args and _are_scores(args[0]):
            size = args[0].numel() * (kwargs.get("dtype") or args[0].dtype).itemsize
            observed.own_attention.setdefault(calling_site(), []).append(size)
        elif func is torch.nn.functional.cross_entropy and args and args[0].dim() == 2:
            observed.losses.append(loss_of(args, kwargs))
        elif func is torch.nn.functional.batch_norm and is_training(args, kwargs):
            observed.batch_statistics = observed.batch_statistics or name

    def _note_reads(self, args: tuple[Any, ...]) -> None:
        """Note activations whose input is an argument of another function after them."""
        if not self._inputs or (self._stack and isinstance(self._stack[-1], _IN_PLACE)):
            return
        for tensor in tensors_in(args):
            kind, _ = self._inputs.get(tensor.data_ptr(), (None, None))
            if kind is not None:
                self.observed.read_again.setdefault(kind, "its input is read again later")

    def _note_input(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Keep the input of an activation, so that nothing else gets its address."""
        if not isinstance(module, _IN_PLACE) or module.inplace or not args:
            return
        if args[0].is_leaf:
            because = "its input is not computed by the model"
            self.observed.read_again.setdefault(class_of(module), because)
        self._inputs[args[0].data_ptr()] = (class_of(module), args[0])

    def begins(self, module: torch.nn.Module, outer: list[torch.nn.Module]) -> None:
        self._stack = outer
        self._changed.append(side_effect(module))
        self._saved.append(set())
        # In a backward pass modules are called again by checkpoints of the user's own.
        if not outer and not self._in_backward:
            self._called_at = calling_site()
            if module not in self._known:
                self._add_root(module)
            self._random = random_state(self.observed.device)
        self.observed.unused.note(self.observed.device)

    def _add_root(self, module: torch.nn.Module) -> None:
        observed = self.observed
        root = Root(class_of(module), self._made.get(module), self._called_at)
        self._known[module] = root
        observed.roots.append(root)
        observed.is_compiled |= any(map(is_compiled, module.modules()))
        for child in module.modules():
            for inner in child.modules():
                if inner is not child:
                    root.nested.setdefault(class_of(inner), set()).add(class_of(child))
        for child in module.modules():
            kind = class_of(child)
            root.classes[kind] += 1
            if has_forward_hooks(child):
                because = f"its {kind.__name__} has a forward hook"
                for around in root.nested.get(kind, ()):
                    observed.side_effects.setdefault(around, because)
            if isinstance(child, _IN_PLACE) and not child.inplace:
                observed.activations.setdefault(kind, []).append(self._made.get(child))
        observed.is_distributed |= _has_process_group()
        for parameter in module.parameters():
            root.has_parameters = True
            observed.half |= parameter.dtype in (torch.bfloat16, torch.float16)
            if parameter.device.type != "cpu":
                observed.device = parameter.device.type

    def ends(
        self, module: torch.nn.Module, outer: list[torch.nn.Module], arguments: Any, result: Any
    ) -> None:
        observed = self.observed
        self._note_input(module, arguments[0])
        effect = self._changed.pop()() if self._changed else ""
        saved = self._saved.pop() if self._saved else set()
        if effect:
            for around in (module, *outer):
                observed.side_effects.setdefault(class_of(around), effect)
        if module.training and isinstance(module, _OF_BATCH):
            observed.batch_statistics = class_of(module).__name__
        if module.training and isinstance(module, _DROPOUT):
            observed.has_dropout = observed.has_dropout or module.p > 0
        observed.is_autocast |= torch.is_autocast_enabled(observed.device)
        root = self._known.get(outer[0] if outer else module)
        if root is not None:
            number = len(root.saved_bytes.setdefault(class_of(module), []))
            root.saved_bytes[class_of(module)].append(sum(size for _, size in saved))
            root.positions.setdefault(class_of(module), []).append(number)
        if self._saved:
            self._saved[-1] |= saved
        if not outer and root is not None:
            observed.draws |= random_state(observed.device) != self._random
            self._note_call(root, arguments, result)
        elif root is not None and not self._in_backward:
            # A backward pass may begin inside: with what a hook keeps, for example.
            for tensor in tensors_in(result):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(_reached, root, self._called_at))

    def _note_call(self, root: Root, arguments: Any, result: Any) -> None:
        args, kwargs = arguments
        first = next(tensors_in(arguments), None)
        if first is not None and first.dim():
            is_text = first.dim() == 2 and not first.is_floating_point()
            self.observed.sizes.append(Sizes(first.shape[0], first.shape[1] if is_text else 0))
        root.takes_floats |= any(
            map(torch.is_floating_point, tensors_in([*args, *kwargs.values()]))
        )
        sizes = {
            arg.shape[0] if isinstance(arg, torch.Tensor) and arg.dim() > 0 else 0 for arg in args
        }
        root.batch_size = sizes.pop() if len(sizes) == 1 and not kwargs else 0
        for tensor in tensors_in(result):
            root.returns_scalar = tensor.dim() == 0 and tensor is result
            if tensor.requires_grad:
                root.needs_gradients = True
                if root.returns_scalar and not root.numbers_of_parts:
                    has_values = self.observed.has_values
                    root.numbers_of_parts = numbers_of_parts(tensor, has_values=has_values)
                site = self._called_at
                root.calls.setdefault(site, False)
                tensor.register_hook(functools.partial(_reached, root, site))

    def packs(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._saved and not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            self._saved[-1].add((storage.data_ptr(), storage.nbytes()))
        # Not the tensor itself: a node that saves its own result would never be freed.
        return tensor.detach()

    @contextmanager
    def observing(self) -> Iterator[Observed]:
        observed = self.observed

        def module_made(init: Callable[..., None]) -> Callable[..., None]:
            def made(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
                init(module, *args, **kwargs)
                self._made[module] = calling_site(module)

            return made

        def optimizer_made(init: Callable[..., None]) -> Callable[..., None]:
            def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
                init(optimizer, *args, **kwargs)
                observed.optimizers[type(optimizer)] = calling_site(optimizer)
                observed.until_step.made(optimizer)

            return made

        def zeroed(function: Callable[..., Any]) -> Callable[..., Any]:
            def zero(owner: Any, set_to_none: bool = True) -> None:
                if not set_to_none:
                    observed.keeps_zeros.append(calling_site() if calls_directly(1) else None)
                self._in_optimizer += 1
                try:
                    function(owner, set_to_none)
                finally:
                    self._in_optimizer -= 1

            return zero

        def backwards(function: Callable[..., Any]) -> Callable[..., Any]:
            # The positions of retain_graph and create_graph.
            first = 2 if function is torch.autograd.backward else 3

            def backward(*args: Any, **kwargs: Any) -> Any:
                observed.backward_calls += 1
                observed.unused.note(observed.device)
                self._since_step += 1
                observed.until_step.begins_backward()
                kept = (*args[first : first + 2], kwargs.get("retain_graph"))
                observed.is_higher_order |= any(kept) or bool(kwargs.get("create_graph"))
                self._in_backward += 1
                try:
                    return function(*args, **kwargs)
                finally:
                    self._in_backward -= 1

            return backward

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            observed.optimizers.setdefault(type(optimizer), None)
            observed.steps += 1
            observed.unused.note(observed.device)
            ends_passes()
            observed.until_step.steps(optimizer)
            self._in_optimizer += 1
            groups = optimizer.param_groups
            sizes = (each.nbytes for group in groups for each in group["params"])
            observed.state_bytes = max(observed.state_bytes, sum(sizes))
            observed.foreach |= any(
                "foreach" in group and group["foreach"] is None and not group.get("fused")
                for group in groups
            )
            # A closure is the user's code, or that of a trainer, which may clip gradients in it.
            first, rest = args[:1], (outside(each) if callable(each) else each for each in args[1:])
            named = {key: outside(kwargs[key]) for key in kwargs if callable(kwargs[key])}
            return (*first, *rest), {**kwargs, **named}

        def ends_passes() -> None:
            observed.accumulates |= self._since_step > 1
            self._since_step = 0

        def outside(closure: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                self._in_optimizer -= 1
                try:
                    return closure()
                finally:
                    self._in_optimizer += 1

            return run

        def after_step(*_: Any) -> None:
            ends_passes()  # those of a closure
            observed.until_step.has_stepped()
            self._in_optimizer -= 1

        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        wrappers: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch.nn.Module, "__init__", module_made),
            (torch.optim.Optimizer, "__init__", optimizer_made),
            (torch.optim.Optimizer, "zero_grad", zeroed),
            (torch.nn.Module, "zero_grad", zeroed),
            (torch.autograd, "backward", backwards),
            (torch.autograd, "grad", backwards),
        ]
        with ExitStack() as stack:
            for owner, name, wrapper in wrappers:
                stack.enter_context(replaced(owner, name, wrapper(vars(owner)[name])))
            stack.callback(register_optimizer_step_pre_hook(before_step).remove)
            stack.callback(register_optimizer_step_post_hook(after_step).remove)
            stack.enter_context(calls_followed(self.begins, self.ends))
            stack.enter_context(
                torch.autograd.graph.saved_tensors_hooks(self.packs, lambda tensor: tensor)
            )
            stack.enter_context(_Functions(self))
            stack.callback(self._inputs.clear)
            stack.callback(observed.mixing.end)
            yield observed


def _reached(root: Root, site: Site | None, _: torch.Tensor) -> None:
    root.has_gradients = root.calls[site] = True


def _are_scores(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a score for each pair of tokens, and a graph keeps the softmax of it."""
    is_square = tensor.dim() in (3, 4) and tensor.shape[-1] == tensor.shape[-2]
    return is_square and tensor.shape[-1] >= _LEAST_TOKENS and tensor.requires_grad


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def observing() -> Iterator[Observed]:
    """Observe the block: what it shows is in the result, which is complete at its end."""
    with _Observer().observing() as observed:
        yield observed
