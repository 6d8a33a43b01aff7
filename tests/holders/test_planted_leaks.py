"""Every planted leak is found to the byte, and its holder, its line and a remedy are named."""

from collections.abc import Iterator

import pytest
from leaks_in_caches import CACHES
from leaks_in_graphs import GRAPHS
from leaks_in_objects import OBJECTS
from leaks_in_programs import PROGRAMS
from leaks_in_torch import TORCH
from planted import NO_HOLDER, Leak, cleaned_up, holder_text

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.core import sentences

NEEDS_LIBRARY = [
    "adapted_parameter_as_an_attribute",
    "at_exit",
    "backward_that_creates_a_graph",
    "buckets_of_a_reducer",
    "callback_of_a_future_of_torch",
    "capsule_of_dlpack",
    "checkpointed_function_that_references_its_result",
    "code_of_torch_compile",
    "constant_of_code_that_torchscript_has_optimized",
    "flat_parameter_of_a_model_that_was_deleted",
    "gradient_with_a_graph_as_an_attribute",
    "hook_before_a_node_that_uses_its_output",
    "hook_of_a_graph_node",
    "hook_of_a_node_that_uses_its_output",
    "hook_of_a_tensor_that_uses_the_tensor",
    "hook_of_several_tensors",
    "local_of_a_running_thread",
    "module_with_its_last_loss_and_a_method_as_a_hook",
    "node_that_accumulates_as_an_attribute",
    "object_of_a_class_that_refuses_access_referenced_by_c_code",
    "optimizer_in_a_hook_with_its_last_loss",
    "output_in_the_metadata_of_its_node",
    "thread_local_of_another_thread",
    "two_gradients_that_use_the_other_parameter",
    "weights_of_a_quantized_module_in_the_layout_of_a_library",
]
"""Leaks whose holder is read by the compiled library, or whose bytes the ledger does not see, or,
of another thread, whose line."""
LEAKS = [
    pytest.param(leak, marks=[pytest.mark.native] * (leak.name in NEEDS_LIBRARY), id=leak.name)
    for leak in (*OBJECTS, *PROGRAMS, *TORCH, *GRAPHS, *CACHES)
]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.filterwarnings("ignore:.*quantiz.*deprecated")
@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_reported_with_its_bytes_holder_line_and_hint(leak: Leak) -> None:
    """Each planted leak is reported with the bytes, holder, line and
    hint of its row, and no other.
    """
    with MemoryProbe("cpu").measure() as region:
        leak.plant()
    assert region.retained_bytes == leak.bytes
    assert sum(holding.bytes for holding in region.retained) == leak.bytes
    holding = region.retained[0]
    assert leak.held_by in holder_text(holding)
    assert (holding.held_by is None) == (leak.held_by == NO_HOLDER)
    assert any(leak.is_made_by(frame) for frame in holding.created_at), holding.created_at
    if leak.hint is None:
        assert holding.hint is None or leak.held_by == NO_HOLDER
    else:
        assert leak.hint in (holding.hint or "")
    said = sentences.sentence(region.record, "retained_bytes")
    explained_bytes = sum(each.bytes for each in region.retained if each.held_by is not None)
    if leak.held_by == NO_HOLDER:
        assert said.endswith("; no Python object was found that references the rest")
    else:
        assert explained_bytes >= 0.95 * leak.bytes
    assert said.startswith("explains ")


def test_nearly_all_planted_leaks_have_a_holder() -> None:
    """In 95 % of the leaks at least 95 % of the bytes are explained; in others, that is said."""
    every = [*OBJECTS, *PROGRAMS, *TORCH, *GRAPHS, *CACHES]
    without = [leak.name for leak in every if leak.held_by == NO_HOLDER]
    assert len(without) <= 0.05 * len(every), without
