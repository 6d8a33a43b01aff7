"""What torch's C++ code keeps: the private names by which it keeps tensors, and its references.

Each name may be missing: then what it keeps is reported without its holder.

How many references a tensor, a storage or an autograd node has: torch has functions for tensors and
storages, but none for nodes. The Python object of a node has a pointer to the node, or to the
counts of its references. Where these are depends on the torch version, so each way is tried on
nodes that have a known number of references.
"""

import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from pytest_cka_memory.meters import torch_private

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


def compiles_backward() -> bool:
    """Whether backward passes are compiled now, of all threads."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


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
    traced: list[tuple[str, Any]] = []
    read = getattr(vars(module).get("_c"), "_retrieve_traced_inputs", None)
    inputs = {} if read is None else read()
    for method in inputs:
        for number, it in enumerate(inputs[method]):
            traced.append((f"._c._retrieve_traced_inputs()[{method!r}][{number}]", it))
    return traced


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


_WORD = ctypes.sizeof(ctypes.c_void_p)
_COUNT = 0xFFFFFFFF
"""The count of strong references is in the lower half of a word."""


class Uses(NamedTuple):
    """The references to a tensor, a storage or an autograd node."""

    cpp: int
    """Those in C++, without that of its Python object."""
    python: int
    """How many of the references to its Python object are C++'s."""


def tensor_uses(tensor: torch.Tensor) -> Uses:
    """Return the references to a tensor."""
    return _uses(torch_private.use_count(tensor))


def storage_uses(storage: torch.UntypedStorage) -> Uses:
    """Return the references to a storage; those in C++ are tensors'."""
    return _uses(storage_use_count(storage))


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return the references to a storage, with that of its Python object."""
    return torch_private.storage_use_count(torch_private.storage_key(storage))


def _uses(count: int) -> Uses:
    in_cpp = count - 1
    return Uses(in_cpp, int(in_cpp > 0 and keeps_objects()))


@cache
def keeps_objects() -> bool:
    """Whether C++ references the Python object of a tensor or storage that it uses.

    Before torch 2.10, it does only while nothing else references the object.
    """
    tensor = torch.ones(1, device="cpu")
    storage = tensor.untyped_storage()
    del tensor
    before = sys.getrefcount(storage)
    user = torch.empty(0, device="cpu").set_(storage)
    return user is not None and sys.getrefcount(storage) > before


def node_uses(node: Any) -> Uses | None:
    """Return the references to an autograd node; None if they cannot be known."""
    way = _way_for(node)
    return None if way is None else way.uses(node)


def prepare_counts() -> None:
    """Try everything that this module needs to know, which allocates a few bytes on the CPU."""
    keeps_objects()
    type_of_nodes()
    _places_in_saved()


@cache
def type_of_nodes() -> type:
    """Return a type of autograd nodes that are written in C++; the others are similar."""
    with torch.enable_grad():
        return type((torch.ones(1, device="cpu", requires_grad=True) * 2).grad_fn)


def way_of_nodes() -> "Way | None":
    """Return how to read the references to nodes that are written in C++; None if unknown."""
    return _ways()[0]


def address_of_node(node: Any) -> int | None:
    """Return the address of an autograd node in C++; None if it cannot be known."""
    way = _way_for(node)
    return None if way is None else _word(id(node) + way.place_of_node)


def is_packed(saved: Any) -> bool:
    """Whether a hook of the user has packed what a node has saved; False if it is not known."""
    places = _places_in_saved()
    return places is not None and _word(_start(saved) + places.hooks) != 0


def place_of_hooks() -> int | None:
    """Return where in what a node has saved the user's hooks are, in bytes; None if unknown."""
    places = _places_in_saved()
    return None if places is None else places.hooks


def node_of_packed(saved: Any) -> int | None:
    """Return the address of the node of a tensor that a hook has packed; None if it has none.

    What is saved references it: the node that has computed the tensor, or that adds up the gradient
    of a leaf.
    """
    places = _places_in_saved()
    if places is None:
        return None
    start = _start(saved)
    return _word(start + places.node) or _word(start + places.node_of_leaf) or None


def pack_hook_of(saved: Any) -> Any:
    """Return the hook that has packed what a node has saved; None if it is not known.

    torch keeps it although it is never called again.
    """
    places = _places_in_saved()
    if places is None or places.pack_hook is None:
        return None
    hook = _word(_word(_start(saved) + places.hooks) + places.pack_hook)
    return ctypes.cast(hook, ctypes.py_object).value if hook else None


class Way(NamedTuple):
    """How to read the references to a node, from its Python object."""

    place_of_node: int
    """Where in the object the address of the node is."""
    place_of_counts: int
    """Where the address is behind which the references in C++ are counted."""
    of_object: int
    """How many of these are the object's."""
    of_cpp: int
    """How many of the references to the object are C++'s, as long as there are any in C++."""

    def uses(self, node: Any) -> Uses:
        """Return the references to a node."""
        uses = _word(_word(id(node) + self.place_of_counts) + _WORD) & _COUNT
        uses -= self.of_object
        return Uses(uses, self.of_cpp if uses else 0)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _way_for(node: Any) -> Way | None:
    is_custom = isinstance(node, torch.autograd.function.BackwardCFunction)
    return _ways()[1 if is_custom else 0]


@cache
def _ways() -> tuple[Way | None, Way | None]:
    """Return how to read nodes that are written in C++, and those of custom functions."""
    with torch.enable_grad():
        leaf = torch.ones(1, device="cpu", requires_grad=True)
        of_custom = torch_private.FUNCTION_BASE.__basicsize__
        return _tried(lambda: leaf * 2), _tried(lambda: _Custom.apply(leaf), of_custom)


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _tried(make: Callable[[], torch.Tensor], size: int | None = None) -> Way | None:
    """Return a way that counts the references of a node right; None if there is none.

    Args:
        make: returns a tensor with a new node.
        size: of the part of the node's Python object that torch defines; None for all of it.
    """
    result = make()
    node, alone = result.grad_fn, object()
    for place in range(2 * _WORD, size or type(node).__basicsize__, _WORD):
        with suppress(*_NO_ADDRESS):
            counts = _counts_of(id(node) + place, result)
            for of_object in (0, 1):
                if counts == [of_object + expected for expected in (1, 4, 2)]:
                    # Both are variables, because Python 3.14 counts no argument that is one.
                    of_cpp = sys.getrefcount(node) - sys.getrefcount(alone)
                    # An intrusive pointer leads to the counts; beside a shared one is another.
                    place_of_node = place if of_cpp and of_object else place - _WORD
                    return Way(place_of_node, place, of_object, of_cpp)
    return None


_NO_ADDRESS = (OSError, ValueError, OverflowError)


def _counts_of(place: int, result: torch.Tensor) -> list[int]:
    """Return what the word at a place leads to while a node has 1, 4 and 2 references."""

    def count() -> int:
        return _tried_word(_tried_word(place) + _WORD) & _COUNT

    counts = [count()]
    following = [result + 1 for _ in range(3)]
    counts.append(count())
    del following[1:]
    counts.append(count())
    return counts


def _tried_word(address: int) -> int:
    """Return the word at an address that may be wrong.

    Raises:
        OSError, ValueError, OverflowError: if it is.
    """
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        return int.from_bytes(os.pread(memory.fileno(), _WORD, address), sys.byteorder)


class _Places(NamedTuple):
    """Where something is in what a node has saved, in bytes from its start."""

    hooks: int
    node: int
    node_of_leaf: int
    pack_hook: int | None
    """Where the hook that packs is in the hooks."""


_MOST_WORDS = 32
"""How many words of what a node has saved are searched."""


def _start(saved: Any) -> int:
    return _word(id(saved) + 2 * _WORD)


@cache
def _places_in_saved() -> _Places | None:
    """Return where the hooks and the node of a packed tensor are; None if that is not found."""
    with torch.enable_grad():
        leaf = torch.ones(1, device="cpu", requires_grad=True)
        value = leaf * 2
        plain = value.sin().grad_fn
        with torch.autograd.graph.saved_tensors_hooks(_pack, lambda _: value):
            packed, packed_leaf = value.sin().grad_fn, leaf.sin().grad_fn
    if packed_leaf is None:
        return None
    names = raw_saved(type(packed))
    if len(names) != 1:
        return None
    node = address_of_node(value.grad_fn)
    node_of_leaf = address_of_node(packed_leaf.next_functions[0][0])
    if node is None or node_of_leaf is None:
        return None
    with suppress(*_NO_ADDRESS):
        of_plain, of_packed, of_leaf = (
            _words_of(getattr(it, names[0])) for it in (plain, packed, packed_leaf)
        )
        place, leaf_place = of_packed.index(node), of_leaf.index(node_of_leaf)
        if of_packed[place - 1] and not of_plain[place - 1] and not of_plain[place]:
            hooks = [_tried_word(of_packed[place - 1] + at * _WORD) for at in range(_MOST_WORDS)]
            pack_hook = hooks.index(id(_pack)) * _WORD if id(_pack) in hooks else None
            return _Places((place - 1) * _WORD, place * _WORD, leaf_place * _WORD, pack_hook)
    return None


def _pack(saved: torch.Tensor) -> int:
    return 0


def _words_of(saved: Any) -> list[int]:
    start = _tried_word(id(saved) + 2 * _WORD)
    return [_tried_word(start + number * _WORD) for number in range(_MOST_WORDS)]


def saves_for_backward() -> bool:
    """Return whether a hook that saves tensors for a backward pass called the caller.

    Such hooks are those of ``torch.autograd.graph.save_on_cpu`` and ``saved_tensors_hooks``.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(True)
    code = getattr(hooks[0], "__code__", None) if hooks else None
    frame = sys._getframe(1) if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
