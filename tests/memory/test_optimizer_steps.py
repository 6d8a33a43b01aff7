"""``region.each_step``: steps of optimizers are batch boundaries while a block runs."""

import contextlib
import gc
import re
import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from pytest_cka_memory import MemoryProbe, RegionError
from pytest_cka_memory.measure.region import Region


class Leaf:
    """A weight and its optimizer; ``step()`` is one training step."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.weight = nn.Parameter(torch.ones(8))
        self.optimizer = kind([self.weight], lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.weight.square().sum().backward()
        self.optimizer.step()


def hooks() -> int:
    """Return the number of hooks on the steps of all optimizers."""
    handle = register_optimizer_step_post_hook(lambda *_: None)
    count = len(handle.hooks_dict_ref()) - 1  # type: ignore[misc]
    handle.remove()
    return count


def boundaries(probe: MemoryProbe, train: Callable[[], object], *counted: object) -> int:
    """Return the number of boundaries of a region that trains."""
    with probe.measure() as region, region.each_step(*counted):
        train()
    assert hooks() == 0
    return len(region.timeline)


@pytest.mark.parametrize("kept_bytes", [0, 4096])
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "every"])
def test_growth_per_step_is_exact(cpu: MemoryProbe, kept_bytes: int, is_named: bool) -> None:
    """Growth per step needs no loader and no change of the loop; Adam's state is of the warm-up."""
    leaf, kept = Leaf(torch.optim.Adam), []
    counted = [leaf.optimizer] if is_named else []
    with cpu.measure() as region, region.each_step(*counted):
        for _ in range(9):
            leaf.step()
            kept.append(torch.empty(kept_bytes, dtype=torch.uint8))
    assert region.growth_bytes_per_batch == kept_bytes
    assert [sample.size for sample in region.timeline] == [None] * 9


def test_accumulated_batches_are_one_batch(probe: MemoryProbe) -> None:
    """A boundary is a step of the optimizer, however many backward passes come before it."""
    leaf = Leaf()

    def train() -> None:
        for batch in range(12):
            leaf.weight.square().sum().backward()
            if batch % 4 == 3:
                leaf.optimizer.step()
                leaf.optimizer.zero_grad()

    assert boundaries(probe, train) == 3


def test_step_that_a_scaler_skips_is_no_boundary(probe: MemoryProbe) -> None:
    """A step that a gradient scaler skips is no boundary; its batch belongs to the next step."""
    leaf, scaler = Leaf(), torch.amp.GradScaler("cpu", init_scale=2.0)

    def train() -> None:
        for factor in (1.0, float("inf"), 1.0, 1.0):
            leaf.optimizer.zero_grad()
            scaler.scale(leaf.weight.sum() * factor).backward()
            scaler.step(leaf.optimizer)
            scaler.update()

    assert boundaries(probe, train) == 3


def test_step_with_a_closure_is_one_boundary(probe: MemoryProbe) -> None:
    """LBFGS calls its closure several times in a step, which is one boundary."""
    leaf, calls = Leaf(torch.optim.LBFGS), []

    def closure() -> torch.Tensor:
        calls.append(1)
        leaf.optimizer.zero_grad()
        loss = (leaf.weight - 3).square().sum()
        loss.backward()
        return loss

    def train() -> None:
        for _ in range(3):
            leaf.optimizer.step(closure)

    assert boundaries(probe, train, leaf.optimizer) == 3
    assert len(calls) > 3


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param("abababab", 4, id="in-turn"),
        pytest.param("abcabcabc", 3, id="three-in-turn"),
        pytest.param("aaabaaabaaab", 9, id="one-steps-more-often"),
        pytest.param("baaabaaabaaa", 9, id="the-second-steps-more-often"),
        pytest.param("aaaabbbb", 7, id="one-after-the-other"),
    ],
)
@pytest.mark.parametrize("are_named", [True, False], ids=["named", "every"])
def test_optimizers_that_step_in_turn_make_one_boundary_for_each_turn(
    probe: MemoryProbe, steps: str, expected: int, are_named: bool
) -> None:
    """The two steps of a GAN are one batch; a second training in the same block counts too."""
    leaves = {name: Leaf() for name in sorted(set(steps))}

    def train() -> None:
        for name in steps:
            leaves[name].step()

    counted = [leaf.optimizer for leaf in leaves.values()] if are_named else []
    assert boundaries(probe, train, *counted) == expected


def test_only_steps_of_the_optimizers_given_count(probe: MemoryProbe) -> None:
    """If optimizers are given, only their steps count, such as one network's of a GAN."""
    first, second = Leaf(), Leaf()

    def train() -> None:
        for _ in range(3):
            first.step()
            second.step()
            second.step()

    assert boundaries(probe, train, first.optimizer) == 3
    assert boundaries(probe, train, second.optimizer) == 6


def test_optimizer_that_is_made_for_each_batch_counts(probe: MemoryProbe) -> None:
    """An optimizer made for each batch counts, because the one before it has been freed."""

    def train() -> None:
        for _ in range(5):
            Leaf().step()

    gc.collect()
    assert boundaries(probe, train) == 5


def test_optimizers_that_stay_alive_and_step_once_each_are_one_batch(probe: MemoryProbe) -> None:
    """Optimizers that stay alive and step once each look like one batch, so a limit on growth
    fails.
    """
    kept: list[Leaf] = []

    def train() -> None:
        for _ in range(6):
            kept.append(Leaf())
            kept[-1].step()

    with probe.measure() as region, region.each_step():
        train()
    assert region.growth_bytes_per_batch is None
    assert len(region.timeline) == 1


def test_step_that_calls_the_step_of_its_base_class_is_one_boundary(probe: MemoryProbe) -> None:
    """A step that calls its base class's step runs torch's hooks twice, and is one boundary."""

    class Logged(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def,override]
            return super().step(closure)

    Leaf(torch.optim.SGD)
    leaf = Leaf(Logged)
    seen: list[object] = []
    with contextlib.ExitStack() as stack:
        handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
        stack.callback(handle.remove)
        leaf.step()
    assert len(seen) == 2
    assert boundaries(probe, lambda: [leaf.step() for _ in range(3)]) == 3


def test_wrapper_that_passes_its_steps_on_can_be_given(probe: MemoryProbe) -> None:
    """A wrapper that only passes its steps on, such as Accelerate's, can be given for its
    optimizer.
    """

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, closure=None):  # type: ignore[no-untyped-def,override]
            return self.optimizer.step()

    leaf = Leaf()
    wrapper = Wrapper(leaf.optimizer)

    def train() -> None:
        for _ in range(3):
            leaf.weight.sum().backward()
            wrapper.step()

    assert boundaries(probe, train, wrapper) == 3


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch 2.11, 2.12
@pytest.mark.filterwarnings("error")
def test_compiled_step_counts_and_its_hook_is_not_traced(probe: MemoryProbe) -> None:
    """The hook of a compiled step is not traced, which would warn and compile again; it counts."""
    leaf = Leaf()
    step = torch.compile(leaf.optimizer.step, backend="eager")

    def train() -> None:
        for _ in range(3):
            leaf.weight.grad = torch.ones(8)
            step()

    assert boundaries(probe, train) == 3


def test_steps_outside_the_block_do_not_count(probe: MemoryProbe) -> None:
    """Steps of a warm-up outside the block do not count, and a second block goes on."""
    leaf = Leaf()
    with probe.measure() as region:
        leaf.step()
        steps = region.each_step()
        with steps:
            leaf.step()
        leaf.step()
        with steps:
            leaf.step()
        region.batch_done()
    assert len(region.timeline) == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hook_is_removed_if_the_block_raises(
    probe: MemoryProbe, error: type[BaseException]
) -> None:
    """If the block raises, its hook is removed; otherwise every later step would call it."""
    with (
        contextlib.suppress(error),
        probe.measure() as region,
        region.each_step(),
    ):
        assert hooks() == 1
        raise error
    assert hooks() == 0


def test_inner_region_counts_the_same_steps_as_the_outer_one(probe: MemoryProbe) -> None:
    """An inner region and the outer one count the same steps, each with its own boundaries."""
    leaf = Leaf()
    with probe.measure() as outer, outer.each_step():
        leaf.step()
        with probe.measure() as inner, inner.each_step(leaf.optimizer):
            leaf.step()
        leaf.step()
    assert (len(outer.timeline), len(inner.timeline)) == (3, 1)


def test_block_that_is_longer_than_its_region_samples_nothing_more(probe: MemoryProbe) -> None:
    """A block that is longer than its region samples nothing more,
    as a loader that is used later.
    """
    leaf = Leaf()
    with contextlib.ExitStack() as stack:
        with probe.measure() as region:
            stack.enter_context(region.each_step())
            leaf.step()
        leaf.step()
    assert (len(region.timeline), hooks()) == (1, 0)


def test_neither_optimizer_nor_region_is_kept_alive(probe: MemoryProbe) -> None:
    """Counting steps keeps no optimizer alive: one that the code
    drops in the block is freed there.
    """
    gc.collect()
    gc.disable()
    try:
        with probe.measure() as region, region.each_step():
            leaf = Leaf()
            leaf.step()
            known = weakref.ref(leaf.optimizer)
            del leaf
            assert known() is None
        known_region = weakref.ref(region)
        del region
        assert known_region() is None
    finally:
        gc.enable()


def sampled_twice_by_a_loader(region: Region) -> None:
    for _ in region.batches([1, 2]):
        pass


@pytest.mark.parametrize(
    "sample", [sampled_twice_by_a_loader, lambda region: region.batch_done()], ids=["loader", "own"]
)
def test_batches_that_are_counted_twice_are_refused(
    probe: MemoryProbe, sample: Callable[[Region], object]
) -> None:
    """Batches that are counted twice are refused, because growth per batch would be halved."""
    with (
        pytest.raises(RegionError, match="region 'fit' counts each batch twice: at the step of"),
        probe.measure("fit") as region,
        region.each_step(),
    ):
        sample(region)
    assert hooks() == 0


def test_second_block_inside_the_first_is_refused(probe: MemoryProbe) -> None:
    """A second block inside the first is refused, because the steps would count twice."""
    leaf = Leaf()
    with probe.measure("fit") as region, region.each_step(leaf.optimizer):
        with (
            pytest.raises(RegionError, match="region 'fit' already counts the steps of optimizers"),
            region.each_step(),
        ):
            raise AssertionError("the block must not begin")
        leaf.step()
    assert (len(region.timeline), hooks()) == (1, 0)


def test_call_without_with_is_an_error(probe: MemoryProbe) -> None:
    """A call without ``with`` counts nothing, which a limit on the
    peak would not notice: an error.
    """
    mistake = "region 'fit': each_step(...) was called without 'with', so no step was counted"
    with pytest.raises(RegionError, match=re.escape(mistake)), probe.measure("fit") as region:
        region.each_step()
    assert not region.record.completed


def test_error_of_the_block_comes_before_that_of_an_unused_call(probe: MemoryProbe) -> None:
    """An error of the block is raised first, because it may be why a call was not used."""

    def fail(region: Region) -> None:
        region.each_step()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), probe.measure() as region:
        fail(region)


def test_call_after_the_region_is_an_error(probe: MemoryProbe) -> None:
    """After the end of the region nothing is sampled, so that a call is an error."""
    with probe.measure("fit") as region:
        pass
    with pytest.raises(RegionError, match="region 'fit' has ended; use each_step inside its"):
        region.each_step()


@pytest.mark.parametrize(
    "wrong", [nn.Linear(1, 1), DataLoader([1]), [Leaf().optimizer], Leaf().optimizer.step, None]
)
def test_what_is_not_an_optimizer_is_refused(probe: MemoryProbe, wrong: object) -> None:
    """If ``each_step`` gets no optimizer, the error has both lines that may have been meant."""
    with (
        pytest.raises(TypeError, match=f"takes optimizers, not {type(wrong).__name__}; write 'wi"),
        probe.measure() as region,
    ):
        region.each_step(wrong)


def test_loop_over_it_is_refused(probe: MemoryProbe) -> None:
    """A loop over ``each_step()`` is refused, because ``batches`` is meant for loops."""

    def loop(steps: Iterable[object]) -> None:
        for _ in steps:
            raise AssertionError("there is nothing to loop over")

    with (
        pytest.raises(TypeError, match="cannot be iterated over; write 'with region"),
        probe.measure() as region,
    ):
        loop(region.each_step())  # type: ignore[arg-type]
