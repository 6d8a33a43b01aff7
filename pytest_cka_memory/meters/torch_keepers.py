"""The private names of torch by which its C++ code, compilers and loaders keep tensors.

Each of them may be missing: then what it keeps is reported without its holder.
"""

import sys
import weakref
from typing import Any

import torch

COMPILER_PACKAGES = ("torch._dynamo", "torch._inductor", "torch._functorch._aot_autograd")
"""Packages whose objects and functions belong to code that ``torch.compile`` made."""
DYNAMO = "torch._dynamo"
"""The name of a package of torch; it is not imported for it."""
RESET_COMPILER = "torch._dynamo.reset()"


def uses_cuda() -> bool:
    """Whether this process has used CUDA, which an emulated device counts as."""
    return bool(torch.cuda.is_initialized())


def has_compiled() -> bool:
    """Whether ``torch.compile`` has compiled a frame in this process."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames"))


def bucket_sizes(model: Any) -> list[int]:
    """Return the bytes of the buckets of a DistributedDataParallel; empty if it is not known."""
    try:
        data = model._get_ddp_logging_data()
    except (AttributeError, RuntimeError):  # it is under construction
        return []
    texts = (data.get(name, "") for name in ("bucket_sizes", "rebuilt_bucket_sizes"))
    return [int(size) for text in texts for size in text.split(",") if size.strip().isdecimal()]


def script_references(value: Any) -> list[tuple[str, Any]]:
    """Return what an object of TorchScript holds in C++: parameters, buffers and constants."""
    references: list[tuple[str, Any]] = []
    try:
        if isinstance(value, torch.jit.ScriptModule):
            named = [*value.named_parameters(), *value.named_buffers()]
            references += ((f".{name}", it) for name, it in named)
            references += _traced_inputs(value)
        elif isinstance(value, (torch._C.ScriptList, torch._C.ScriptDict)):
            keys = range(len(value)) if isinstance(value, torch._C.ScriptList) else value.keys()
            references += ((f"[{key!r}]", value[key]) for key in keys)
            return references
        for number, node in enumerate(value.graph.findAllNodes("prim::Constant")):
            if node.hasAttribute("value") and node.kindOf("value") == "t":
                text = f".graph.findAllNodes('prim::Constant')[{number}]"
                references.append((text, node.t("value")))
    except (RuntimeError, AttributeError):  # under construction, or without a forward()
        pass
    return references


def _traced_inputs(module: torch.jit.ScriptModule) -> list[tuple[str, Any]]:
    """Return the inputs that ``torch.jit.trace`` has traced a module with, which it keeps."""
    found: list[tuple[str, Any]] = []
    read = getattr(vars(module).get("_c"), "_retrieve_traced_inputs", None)
    inputs = {} if read is None else read()
    for method in inputs:
        for number, it in enumerate(inputs[method]):
            found.append((f"._c._retrieve_traced_inputs()[{method!r}][{number}]", it))
    return found


_PACKED = "__torch__.torch.classes.quantized."
"""How the names of the classes of TorchScript begin that keep weights of quantized modules."""


def packed_tensors(value: Any) -> list[Any]:
    """Return the weight and the bias that a ``torch.ScriptObject`` keeps packed; None each if none.

    Each may be a copy, which only the caller references.
    """
    try:
        if not value._type().qualified_name().startswith(_PACKED):
            return []
        unpacked = value.unpack()
    except (RuntimeError, AttributeError):  # it has no unpack(), or its library is not available
        return []
    return list(unpacked) if isinstance(unpacked, tuple) else [unpacked]


_RAW_SAVED = "_raw_saved_"
_raw_saved: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""What is known of the types of nodes; weakly, because users define some of them."""


def raw_saved(kind: type) -> tuple[str, ...]:
    """Return the attributes of a type of autograd node that hold its saved tensors, not unpacked.

    Tensors that are held under other names are reported as having no Python holder.
    """
    names = _raw_saved.get(kind)
    if names is None:  # dir() takes longer than all else that is asked of a small node
        names = tuple(name for name in dir(kind) if name.startswith(_RAW_SAVED))
        _raw_saved[kind] = names
    return names


def unpacked_name(raw: str) -> str:
    """Return the attribute by which users read what is saved under a raw attribute."""
    return "saved_tensors" if raw == f"{_RAW_SAVED}tensors" else raw.replace("_raw", "", 1)


def received_early(iterator: Any) -> list[Any]:
    """Return the batches that a loader's iterator has received but not yielded yet."""
    tasks = getattr(iterator, "_task_info", {})
    return [task[1] for task in list(tasks.values()) if len(task) == 2]


def saved_by(node: Any, name: str, default: Any = None) -> Any:
    """Return what a node of a graph has saved, such as its ``reduction``; `default` if nothing."""
    return getattr(node, "_".join(("", "saved", name)), default)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` compiles the calls of a module; False if unknown."""
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return is_wrapper or getattr(module, "_compiled_call_impl", None) is not None
