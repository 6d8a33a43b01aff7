"""Leaks specific to torch: graphs, hooks, gradients, optimizers, views, NumPy arrays."""

import ctypes
from typing import Any

import numpy as np
import refusing_objects
import torch
from planted import CLEANUP, KEEP, NO_HOLDER, Table, leak
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

TORCH: Table = []
LOSSES: list[Any] = []
WEIGHT = nn.Parameter(torch.ones(250))
LINEAR = nn.Linear(5, 50, bias=False)
ATTACHED = "keep loss.item()"
HOOK = "handle.remove()"
VIEW = "clone()"
SHOWS_SAVED = hasattr(torch._C._autograd.SavedTensor, "data")  # not in torch 2.9
PACKED = "_raw_saved_result.data['packed']" if SHOWS_SAVED else "_saved_result"


@leak(TORCH, "leaks_in_torch.LOSSES[0]", hint=ATTACHED, size=4, made=".sum()")
def losses_with_their_graphs() -> None:
    LOSSES.append(WEIGHT.sum())
    CLEANUP.callback(LOSSES.clear)


@leak(
    TORCH,
    "leaks_in_torch.LOSSES[0].grad_fn.next_functions[0][0]._saved_result",
    hint=ATTACHED,
    size=1004,
    made="exp()",
)
def graph_kept_by_a_loss() -> None:
    LOSSES.append(WEIGHT.exp().sum())
    CLEANUP.callback(LOSSES.clear)


@leak(
    TORCH,
    "planted.KEEP[0].grad_fn.next_functions[0][0]._saved_other",
    hint=ATTACHED,
    size=1004,
)
def graph_retained_after_backward() -> None:
    loss = (WEIGHT * torch.ones(250)).sum()
    gradient = torch.autograd.grad(loss, WEIGHT, retain_graph=True)
    del gradient
    KEEP.append(loss)


@leak(
    TORCH,
    "planted.KEEP[0].grad_fn._saved_indices[0]",
    hint="keep the other tensor's detach()",
    size=1500,
    made="dtype=",
)
def indices_saved_by_a_graph() -> None:
    KEEP.append(WEIGHT[torch.ones(125, dtype=torch.int64)])


class StoringInContext(torch.autograd.Function):
    """Stores a tensor as an attribute of its context instead of saving it for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.memory = torch.ones(250)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Saving(torch.autograd.Function):
    """Saves a tensor for backward, as autograd requires."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, torch.ones(250))
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@leak(
    TORCH, "planted.KEEP[0].grad_fn.memory", hint=ATTACHED, size=1004, made="StoringInContext.apply"
)
def attribute_of_a_context() -> None:
    KEEP.append(StoringInContext.apply(WEIGHT))


@leak(
    TORCH,
    "planted.KEEP[0].grad_fn.saved_tensors[1]",
    hint=ATTACHED,
    size=1004,
    made="Saving.apply",
)
def saved_for_backward() -> None:
    KEEP.append(Saving.apply(WEIGHT))


@leak(
    TORCH,
    f"planted.KEEP[0].grad_fn.next_functions[0][0].{PACKED}",
    hint=ATTACHED,
    size=1004,
    made=".exp()",
)
def packed_by_a_saved_tensors_hook() -> None:
    with saved_tensors_hooks(lambda x: {"packed": x.clone()}, lambda packed: packed["packed"]):
        KEEP.append(WEIGHT.exp().sum())


@leak(TORCH, "leaks_in_torch.WEIGHT.grad", hint="zero_grad()", made="backward()")
def gradient() -> None:
    WEIGHT.sum().backward()
    CLEANUP.callback(setattr, WEIGHT, "grad", None)


@leak(
    TORCH,
    "planted.KEEP[0].state[<Parameter>]['exp_avg']",
    hint="first step",
    size=2004,
    made="step()",
)
def optimizer_state() -> None:
    optimizer = torch.optim.Adam([WEIGHT])
    WEIGHT.grad = WEIGHT.detach() * 2
    optimizer.step()
    WEIGHT.grad = None
    KEEP.append(optimizer)


@leak(TORCH, "leaks_in_torch.LINEAR._forward_hooks[", hint=HOOK, made="LINEAR(")
def forward_hook() -> None:
    outputs: list[Any] = []
    handle = LINEAR.register_forward_hook(lambda *call: outputs.append(call[2]))
    CLEANUP.callback(handle.remove)
    with torch.no_grad():
        LINEAR(torch.zeros(5, 5))


@leak(TORCH, "leaks_in_torch.LINEAR._forward_pre_hooks[", hint=HOOK, made="torch.ones(50, 5)")
def forward_pre_hook() -> None:
    inputs: list[Any] = []
    handle = LINEAR.register_forward_pre_hook(lambda *call: inputs.append(call[1]))
    CLEANUP.callback(handle.remove)
    with torch.no_grad():
        LINEAR(torch.ones(50, 5))


@leak(TORCH, "leaks_in_torch.LINEAR._backward_hooks[", hint=HOOK, made="torch.ones(5, 50)")
def backward_hook() -> None:
    gradients: list[Any] = []
    handle = LINEAR.register_full_backward_hook(lambda *call: gradients.append(call[2]))
    CLEANUP.callback(handle.remove)
    CLEANUP.callback(LINEAR.zero_grad)
    LINEAR.requires_grad_(False)
    CLEANUP.callback(LINEAR.requires_grad_)
    LINEAR(torch.zeros(5, 5, requires_grad=True)).backward(torch.ones(5, 50))


@leak(TORCH, "torch.nn.modules.module._global_forward_hooks[", hint=HOOK, made="LINEAR(")
def hook_for_all_modules() -> None:
    outputs: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *call: outputs.append(call[2]))
    CLEANUP.callback(handle.remove)
    with torch.no_grad():
        LINEAR(torch.zeros(5, 5))


@leak(TORCH, "leaks_in_torch.WEIGHT._backward_hooks[", hint=HOOK, made="torch.full((250,)")
def tensor_hook() -> None:
    factor = torch.full((250,), 2.0)
    CLEANUP.callback(WEIGHT.register_hook(lambda gradient: gradient * factor).remove)


@leak(TORCH, "leaks_in_torch.WEIGHT._post_accumulate_grad_hooks[", hint=HOOK)
def hook_after_accumulation() -> None:
    factor = torch.ones(250)
    handle = WEIGHT.register_post_accumulate_grad_hook(lambda _: factor)  # type: ignore[arg-type]
    CLEANUP.callback(handle.remove)


@leak(TORCH, "the hooks of an autograd node: OrderedDict[", hint="handle.remove()", size=1004)
def hook_of_a_graph_node() -> None:
    factor = torch.ones(250)
    loss = WEIGHT.sum()
    loss.grad_fn.register_prehook(lambda gradients: (gradients[0] * factor,))
    KEEP.append(loss)


@leak(TORCH, "planted.KEEP[0].flat[1]")
def array_of_objects() -> None:
    KEEP.append(np.array([None, torch.ones(250)], dtype=object))


@leak(TORCH, "planted.KEEP[0].running")
def registered_buffer() -> None:
    model = nn.Module()
    model.register_buffer("running", torch.ones(250))
    KEEP.append(model)


@leak(TORCH, "planted.KEEP[0][1].weight", made="nn.Linear(5, 50")
def parameter_of_a_model() -> None:
    KEEP.append(nn.Sequential(nn.ReLU(), nn.Linear(5, 50, bias=False)))


@leak(TORCH, "planted.KEEP[0].base")
def numpy_alias() -> None:
    KEEP.append(torch.ones(250).numpy())


@leak(TORCH, "planted.KEEP[0].base.base")
def slice_of_a_numpy_alias() -> None:
    KEEP.append(torch.ones(250).numpy()[:2])


@leak(TORCH, "planted.KEEP[0].obj.base")
def memory_view() -> None:
    KEEP.append(memoryview(torch.ones(250).numpy()))


@leak(TORCH, "planted.KEEP[0]")
def untyped_storage() -> None:
    KEEP.append(torch.ones(250).untyped_storage())


@leak(TORCH, "planted.KEEP[0]._untyped_storage")
def typed_storage() -> None:
    KEEP.append(torch.ones(250).storage())


@leak(TORCH, "planted.KEEP[0]", hint=VIEW)
def small_view_of_a_large_tensor() -> None:
    KEEP.append(torch.ones(250)[:2])


@leak(TORCH, "planted.KEEP[0]", hint="keep the number, tensor.item()", made="mse_loss(")
def reduced_loss_with_the_storage_of_the_unreduced() -> None:
    KEEP.append(nn.functional.mse_loss(torch.ones(250), torch.zeros(250)))


@leak(TORCH, "planted.KEEP[0]", hint="uses only part of its storage", made="mse_loss(")
def attached_loss_with_the_storage_of_the_unreduced() -> None:
    target = LINEAR.weight.detach()
    KEEP.append(nn.functional.mse_loss(LINEAR.weight, target))


@leak(TORCH, "planted.KEEP[0]", size=1000 + 2 * 250 * 8, made="to_sparse()")
def sparse_tensor() -> None:
    KEEP.append(torch.ones(10, 25).to_sparse())


@leak(TORCH, "planted.KEEP[0]", made="x + 1")
def wrapped_by_vmap() -> None:
    torch.vmap(lambda x: KEEP.append(x + 1) or x)(torch.ones(5, 50))


@leak(TORCH, "planted.KEEP[0]", made="x + 1")
def wrapped_by_two_transforms() -> None:
    old = WEIGHT.detach().view(5, 50)
    torch.vmap(torch.func.grad(lambda x: KEEP.append(x + 1) or x.sum()))(old)


@leak(TORCH, "planted.KEEP[0].value()")
def result_of_a_future_of_torch() -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(torch.ones(250))
    KEEP.append(future)


@leak(TORCH, "a function that C code will call: ", hint="such as a Future")
def callback_of_a_future_of_torch() -> None:
    kept = torch.ones(250)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.add_done_callback(lambda _: kept)
    KEEP.append(future)


@leak(TORCH, "planted.KEEP[0]")
def capsule_of_dlpack() -> None:
    KEEP.append(torch.utils.dlpack.to_dlpack(torch.ones(250)))


@leak(TORCH, "planted.KEEP[0][0]")
def list_of_torchscript() -> None:
    KEEP.append(torch._C.ScriptList([torch.ones(250)]))


@leak(TORCH, "planted.KEEP[0].weight", made="nn.Linear(5, 50")
def module_of_torchscript() -> None:
    KEEP.append(torch.jit.script(nn.Linear(5, 50, bias=False)))


@leak(TORCH, "a mode that is active: Mode.kept", hint="with statement")
def mode_that_is_never_left() -> None:
    mode = Mode()
    mode.kept = torch.ones(250)
    mode.__enter__()
    CLEANUP.callback(lambda: _get_current_function_mode_stack()[-1].__exit__(None, None, None))


class Mode(TorchFunctionMode):
    """Changes nothing."""

    kept: Any = None

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


@leak(TORCH, "C or C++ code, which references Tensor (250,)", hint="to find the owner")
def referenced_by_c_code_alone() -> None:
    keep_by_c_code(torch.ones(250))


@leak(TORCH, "C or C++ code, which references OfRefusingType.x", hint="to find the owner")
def object_of_a_class_that_refuses_access_referenced_by_c_code() -> None:
    keep_by_c_code(refusing_objects.of_refusing_type(torch.ones(250)))


def keep_by_c_code(value: Any) -> None:
    kept, address = ctypes.py_object(value), id(value)
    ctypes.pythonapi.Py_IncRef(kept)
    CLEANUP.callback(lambda: ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object)))


def keeping(module: Any, inputs: Any) -> Any:
    """Compile nothing; keep a tensor with the compiled code, as a backend may."""
    kept = torch.ones(250)
    return lambda *args: module(*args) if len(kept) else ()


def identity(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@leak(TORCH, "__compiled_fn_", hint="torch._dynamo.reset() frees them", made="torch.compile(")
def code_of_torch_compile() -> None:
    torch.compile(identity, backend=keeping)(torch.zeros(0))
    CLEANUP.callback(torch._dynamo.reset)


@leak(TORCH, NO_HOLDER, hint="cache_enabled=False", size=500, made="LINEAR(")
def cached_by_autocast() -> None:
    autocast = torch.autocast("cpu", torch.bfloat16)
    autocast.__enter__()
    CLEANUP.callback(autocast.__exit__, None, None, None)
    LINEAR(torch.zeros(0, 5))
