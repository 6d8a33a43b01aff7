"""Tests of CUDA graphs: capture, replay, pools, and the errors of a card."""

import kernels
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from emulated_cuda.errors import DeviceAssertError, StaleValueError
from emulated_cuda.values import operators, staleness

MB = 2**20


def test_nothing_runs_in_a_capture_and_each_replay_computes_with_new_inputs():
    """A capture computes nothing; a replay computes from what the inputs have then."""
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        y += 1
        x.add_(y)
    assert x.tolist() == [1] * 4
    for expected in (4, 13, 40):
        graph.replay()
        assert (x.tolist(), y.tolist()) == ([expected] * 4, [(expected - 1) * 2 // 3 + 1] * 4)


def test_kernels_of_triton_copies_and_zeros_are_replayed_in_order():
    """Kernels of Triton, copies from pinned memory and zeros are replayed in their order."""
    source = torch.arange(8.0).pin_memory()
    x, out = torch.zeros(2, 8, device="cuda")
    kernels.copy[(1,)](out, x, size=8)  # compiled before, because a capture may not load modules
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(source, non_blocking=True)
        kernels.copy[(1,)](out, x, size=8)
        x.zero_()
    source.mul_(2)
    graph.replay()
    assert out.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert x.tolist() == [0] * 8


def test_training_step_in_a_graph_has_the_losses_of_the_cpu():
    """A whole training step in a graph has the losses of the same steps on the CPU."""

    def model_on(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
        return model, torch.optim.Adam(model.parameters(), lr=0.1, capturable=device == "cuda")

    x, y = torch.randn(5, 6), torch.randn(5, 1)
    model, optimizer = model_on("cpu")

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    expected = [step(x, y).item() for _ in range(8)]
    model, optimizer = model_on("cuda")
    x, y = x.cuda(), y.cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = [step(x, y).item() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step(x, y)
    for _ in range(5):
        graph.replay()
        found.append(loss.item())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_graphed_callables_compute_forward_and_backward():
    """``make_graphed_callables`` computes outputs and gradients as the module itself does."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).cuda()
    sample = torch.randn(3, 4, device="cuda", requires_grad=True)
    x = torch.randn(3, 4, device="cuda")
    expected = torch.autograd.grad(plain(x).square().sum(), plain[0].weight)[0]
    graphed = torch.cuda.make_graphed_callables(plain, (sample,))
    for _ in range(2):
        graphed.zero_grad()
        out = graphed(x.clone().requires_grad_())
        out.square().sum().backward()
        torch.testing.assert_close(plain[0].weight.grad, expected)


def test_memory_of_a_pool_stays_with_its_graph_and_may_be_shared():
    """What a capture allocates stays reserved until its graphs are gone; graphs may share it."""
    x = torch.ones(MB, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        y = x * 2
    with torch.cuda.graph(second, pool=first.pool()):
        z = y + 1
    pooled = torch.cuda.memory_reserved() - before
    assert pooled >= 8 * MB
    first.replay()
    second.replay()
    assert z.sum().item() == 3 * MB
    del y, z, first, second
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_random_numbers_are_others_at_each_replay_and_repeat_with_the_seed():
    """Each replay draws other numbers, and the same ones after the same seed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.randn(64, device="cuda")
        y = F.dropout(torch.ones(64, device="cuda"))

    def drawn(seed):
        torch.cuda.manual_seed(seed)
        found = []
        for _ in range(2):
            graph.replay()
            found.append((x.tolist(), y.tolist()))
        return found

    first, again = drawn(1), drawn(1)
    assert first == again
    assert first[0][0] != first[1][0]
    assert first[0][1] != first[1][1]
    assert set(first[0][1]) == {0.0, 2.0}


def drawing_operators():
    p = torch.rand(5000, device="cuda")
    generator = torch.Generator("cuda")
    return {
        "dropout": (F.dropout, (p,), None),
        "bernoulli": (torch.bernoulli, (p,), None),
        "normal_of_means": (torch.normal, (p, 1.0), None),
        "poisson": (torch.poisson, (p * 5,), None),
        "rand": (lambda: torch.rand(4000, device="cuda"), (), None),
        "randint": (lambda: torch.randint(9, (4000,), device="cuda"), (), None),
        "own_generator": (
            lambda: torch.rand(4000, device="cuda", generator=generator),
            (),
            generator,
        ),
    }


@pytest.mark.parametrize("name", drawing_operators())
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
def test_replays_draw_the_numbers_that_the_same_operators_draw_outside(name, warm):
    """Two replays go on where the other stopped; the generator ends where it would without graphs.

    Also if the operator has not run outside of a graph before, as torch advances the generator
    at a replay by all that its operators draw.
    """
    operator, args, generator = drawing_operators()[name]
    if generator is None:
        generator = torch.cuda.default_generators[0]
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    operators._advances.clear()
    if warm:
        operator(*args)
    with torch.cuda.graph(graph):
        first, second = operator(*args), operator(*args)
    generator.manual_seed(7)
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed += [first.clone(), second.clone()]
    offset = generator.get_offset()
    generator.manual_seed(7)
    assert all(torch.equal(operator(*args), found) for found in replayed)
    assert generator.get_offset() == offset
    assert not torch.equal(replayed[0], replayed[1])


def test_graph_draws_from_the_states_that_a_generator_had_at_the_capture():
    """A generator that is given another state in a capture draws from both at each replay."""
    generator = torch.cuda.default_generators[0]
    own = torch.cuda.get_rng_state()
    old = generator.graphsafe_get_state()
    new = generator.clone_state()
    graph = torch.cuda.CUDAGraph()
    for state in (old, new):
        graph.register_generator_state(state)

    def draw():
        found = []
        for state in (new, old, old):
            generator.graphsafe_set_state(state)
            found.append(torch.rand(5, device="cuda"))
        return found

    try:
        with torch.cuda.graph(graph):
            in_graph = draw()
        for state, seed in ((old, 3), (new, 4)):
            state.manual_seed(seed)
        expected = [(*draw(), old.get_offset(), new.get_offset()) for _ in range(2)]
        for state, seed in ((old, 3), (new, 4)):
            state.manual_seed(seed)
        for *numbers, old_offset, new_offset in expected:
            graph.replay()
            assert [x.tolist() for x in in_graph] == [x.tolist() for x in numbers]
            assert (old.get_offset(), new.get_offset()) == (old_offset, new_offset)
    finally:
        generator.graphsafe_set_state(old)
        torch.cuda.set_rng_state(own)


def test_operators_that_were_never_run_outside_draw_different_numbers():
    """How far each of two unknown operators advances the generator is not known; none repeats."""
    p = torch.full((64,), 0.5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    operators._advances.clear()
    with torch.cuda.graph(graph):
        x, y = torch.rand_like(p), torch.rand(64, device="cuda")
    torch.cuda.manual_seed(3)
    graph.replay()
    once = x.tolist(), y.tolist()
    torch.cuda.manual_seed(3)
    graph.replay()
    assert (x.tolist(), y.tolist()) == once
    assert once[0] != once[1]


def test_streams_that_wait_for_each_other_take_part_in_a_capture():
    """Work of a stream that waits for the capturing one, and is waited for, is in the graph."""
    x, other = torch.ones(4, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            y = x + 1
        torch.cuda.current_stream().wait_stream(other)
        z = y * 3
    x.fill_(4)
    graph.replay()
    assert z.tolist() == [15] * 4


# ---- Errors ----


def failing_captures():
    return {
        "item": lambda x: x.sum().item(),
        "nonzero": lambda x: x.nonzero(),
        "mask": lambda x: x[x > 0],
        "equal": lambda x: torch.equal(x, x.clone()),
        "synchronize": lambda x: torch.cuda.current_stream().synchronize(),
        "device": lambda x: torch.cuda.synchronize(),
    }


@pytest.mark.parametrize("way", failing_captures())
def test_operation_that_waits_for_the_device_is_refused_in_a_capture(way):
    """What reads back from the device raises in a capture, as on a card, and all works after it."""
    x = torch.ones(4, device="cuda")
    with (
        pytest.raises(
            RuntimeError, match=r"operation (not permitted|failed due to a previous error)"
        ),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        failing_captures()[way](x)
    assert (x + 1).tolist() == [2] * 4


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layer_is_replayed(kind):
    """A replay computes cuDNN's recurrent layers from the inputs of then."""
    layer, x = kind(4, 4, 2).cuda(), torch.ones(3, 2, 4, device="cuda")
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = layer(x)[0]
    x.copy_(torch.randn(3, 2, 4))
    graph.replay()
    torch.testing.assert_close(found, layer(x)[0].detach())


def approximate_singular_values(x):
    """Call a function of cuSOLVER whose workspace is not known."""
    return torch.linalg.svdvals(x, driver="gesvda")


def long_transform(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(x, n=8191)


@pytest.mark.parametrize(
    "operator", [approximate_singular_values, long_transform], ids=["svdvals", "rfft"]
)
def test_operator_whose_memory_is_not_known_is_refused_in_a_capture(operator):
    """Operators of cuSOLVER and cuFFT whose workspaces are not known are refused by name."""
    x = torch.eye(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    refused = r"(?s)during capture: aten::\w+ cannot be captured in a CUDA graph"
    with pytest.raises(RuntimeError, match=refused), torch.cuda.graph(graph):
        operator(x)
    assert (x + 1).sum().item() == 20


@pytest.mark.parametrize("operator", [torch.fft.fft, torch.linalg.inv_ex], ids=["fft", "inv_ex"])
def test_replay_computes_operators_of_cufft_and_cusolver(operator):
    """A replay computes what is captured of these libraries, from the values at the time."""
    x = torch.eye(4, device="cuda")
    operator(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = operator(x)
    changed = torch.eye(4) + torch.arange(16.0).reshape(4, 4)
    x.copy_(changed)
    graph.replay()
    expected = operator(changed)
    for one, other in zip(
        *(list(each) if isinstance(each, tuple) else [each] for each in (found, expected)),
        strict=True,
    ):
        torch.testing.assert_close(one.cpu(), other)


def test_capture_in_which_something_was_refused_is_not_valid():
    """Its stream still captures, but ending the capture fails, and others work meanwhile."""
    x, stream = torch.eye(4, device="cuda"), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match=r"^aten::\w+ cannot be captured"):
            approximate_singular_values(x)
        assert torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    other, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[0]
    with torch.cuda.graph(other):
        drawn = torch.rand(4, device="cuda")
    generator.manual_seed(3)
    expected = torch.rand(4, device="cuda")
    generator.manual_seed(3)
    other.replay()
    assert torch.equal(drawn, expected)
    with torch.cuda.stream(stream):
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()
        assert not torch.cuda.is_current_stream_capturing()
    assert (x + 1).sum().item() == 20


def fork_without_join(x):
    other = torch.cuda.Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            x.add_(1)


def test_capture_that_a_stream_has_not_joined_is_an_error():
    """A stream that takes part and is not waited for at the end is an error, as on a card."""
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="unjoined work"):
        fork_without_join(x)
    assert (x + 1).tolist() == [2] * 4


def test_error_in_a_replay_is_raised_by_it():
    """A value that a kernel refuses raises in ``replay()``, with the error of the operator."""
    table, at = torch.ones(3, 2, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = F.embedding(at, table)
    graph.replay()
    assert found.sum().item() == 8
    at.fill_(7)
    with pytest.raises(DeviceAssertError, match="index out of range"):
        graph.replay()
    at.fill_(1)
    graph.replay()
    assert found.sum().item() == 8


def test_illegal_access_in_a_replay_is_raised_by_it():
    """A kernel that writes outside of all memory raises the error of CUDA in ``replay()``."""
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernels.write_far[(1,)](x, 2**40)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.write_far[(1,)](x, 2**40)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()


def test_graph_that_reads_unknown_values_raises_at_its_replay():
    """A replay that reads a value that was never computed raises, as an operator would mark it."""
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x * 2
    staleness.mark(x, "x is not known")
    with pytest.raises(StaleValueError, match="x is not known"):
        graph.replay()


def test_graph_that_was_not_captured_cannot_be_replayed():
    """A graph without a capture raises at ``replay()``."""
    with pytest.raises(RuntimeError):
        torch.cuda.CUDAGraph().replay()
