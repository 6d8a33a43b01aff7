"""Recurrent networks of cuDNN, and fused cells."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from emulated_cuda.values import Everywhere, Fitted, alias
from emulated_cuda.values.computing import on_the_cpu
from emulated_cuda.values.equivalents import equivalent
from emulated_cuda.values.operators import Kernel, run

_RELU, _TANH, _LSTM, _GRU = range(4)  # cudnnRNNMode_t


_CUDNN = "aten/src/ATen/native/cudnn/RNN.cpp"
_CELLS = "aten/src/ATen/native/cuda/RNN.cu"


# What cuDNN keeps in its reserve is not known; here it begins with the seed of the dropout.
@equivalent("aten::_cudnn_rnn", source=f"{_CUDNN}: _cudnn_rnn, computed by torch's RNN for the CPU")
def cudnn_rnn(
    input: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
) -> Any:
    seed = int(torch.randint(2**31, ())) if dropout and train else 0
    options = (num_layers, dropout, train, bidirectional, batch_first, seed)
    output, hy, cy = _run(input, weight, weight_stride0, hx, cx, mode, options, batch_sizes)
    reserve = Fitted(torch.tensor([seed]).view(torch.uint8)) if train else None
    buffer = Everywhere(0) if weight_buf is None else weight_buf
    cell = torch.empty(0, dtype=input.dtype) if cy is None else cy
    return output, hy, cell, reserve, buffer


def _run(
    values: Tensor,
    weight: list[Tensor],
    per_layer: int,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    options: Any,
    batch_sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor | None]:
    num_layers, dropout, train, bidirectional, batch_first, seed = options
    has_biases = per_layer >= 4
    function = {
        _RELU: torch.rnn_relu,
        _TANH: torch.rnn_tanh,
        _LSTM: torch.lstm,
        _GRU: torch.gru,
    }[mode]
    state: Any = [hx, cx] if mode == _LSTM else hx
    settings = (has_biases, num_layers, dropout, train, bidirectional)
    if dropout and train:
        torch.default_generator.manual_seed(seed)
    network: Any = function
    if batch_sizes:
        outputs = network(values, torch.tensor(batch_sizes), state, weight, *settings)
    else:
        outputs = network(values, state, weight, *settings, batch_first)
    return (*outputs, None) if mode != _LSTM else outputs


@equivalent("aten::_cudnn_rnn_backward", source=f"{_CUDNN}: the gradients of _cudnn_rnn")
def cudnn_rnn_backward(
    input: Tensor,
    weight: list[Tensor],
    weight_stride0: int,
    hx: Tensor,
    cx: Tensor | None,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    mode: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    reserve: Tensor,
) -> Any:
    seed = int(reserve[:8].view(torch.int64)) if reserve.numel() else 0
    options = (num_layers, dropout, train, bidirectional, batch_first, seed)

    def gradients() -> Any:
        inputs = [input, hx, *([] if cx is None else [cx]), *weight]
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        given_cx = None if cx is None else leaves[2]
        weights = leaves[2 if cx is None else 3 :]
        results = _run(
            leaves[0], weights, weight_stride0, leaves[1], given_cx, mode, options, batch_sizes
        )
        pairs = [
            (result, gradient)
            for result, gradient in zip(results, (grad_output, grad_hy, grad_cy), strict=True)
            if result is not None and gradient is not None
        ]
        roots, seeds = zip(*pairs, strict=True)
        return torch.autograd.grad(roots, leaves, seeds, allow_unused=True)

    gradients_of_all = list(_in_new_thread(gradients))
    of_values, of_hx = gradients_of_all[:2]
    of_cx = torch.empty(0, dtype=input.dtype) if cx is None else gradients_of_all[2]
    return of_values, of_hx, of_cx, gradients_of_all[2 if cx is None else 3 :]


def _in_new_thread(function: Any) -> Any:
    """Call a function in a new thread, because autograd is off in a thread that runs a kernel."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        state = torch.default_generator.get_state()
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)
        finally:
            torch.default_generator.set_state(state)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


# aten/src/ATen/native/cudnn/RNN.cpp: all weights become parts of one buffer.
def flatten_weights(original: Kernel) -> Kernel:
    """Return the kernel of the operator, which gives the weights other memory."""

    def kernel(keyset: Any, weights: list[Tensor], *settings: Any) -> Tensor:
        with on_the_cpu():
            before = [alias(weight).clone() for weight in weights]
        buffer: Tensor = run(original, keyset, (weights, *settings), {})
        with on_the_cpu():
            for weight, value in zip(weights, before, strict=True):
                alias(weight).copy_(value)
        return buffer

    return kernel


@equivalent(
    "aten::_cudnn_init_dropout_state",
    source=f"{_CUDNN}: the state of cuDNN's own generator, which is not used here",
)
def dropout_state() -> Everywhere:
    return Everywhere(0)


# ---- Cells ----


def _gates(tensor: Tensor, other: Tensor, bias: Tensor | None, other_bias: Tensor | None) -> Any:
    with_bias = tensor if bias is None else tensor + bias
    return with_bias, other if other_bias is None else other + other_bias


@equivalent("aten::_thnn_fused_lstm_cell", source=f"{_CELLS}: lstm_cell_forward")
def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    of_input, of_hidden = _gates(input_gates, hidden_gates, input_bias, hidden_bias)
    i, f, g, o = (of_input + of_hidden).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


@equivalent("aten::_thnn_fused_lstm_cell_backward_impl", source=f"{_CELLS}: lstm_cell_backward")
def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    of_h = torch.zeros_like(cx) if grad_hy is None else grad_hy
    of_c = torch.zeros_like(cx) if grad_cy is None else grad_cy
    squashed = cy.tanh()
    of_c = of_c + of_h * o * (1 - squashed.square())
    of_i = of_c * g * i * (1 - i)
    of_f = of_c * cx * f * (1 - f)
    of_g = of_c * i * (1 - g.square())
    of_o = of_h * squashed * o * (1 - o)
    gates = torch.cat([of_i, of_f, of_g, of_o], 1)
    return gates, of_c * f, gates.sum(0) if has_bias else None


@equivalent("aten::_thnn_fused_gru_cell", source=f"{_CELLS}: gru_cell_forward")
def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Any:
    of_input, of_hidden = _gates(input_gates, hidden_gates, input_bias, hidden_bias)
    r_input, z_input, n_input = of_input.chunk(3, 1)
    r_hidden, z_hidden, n_hidden = of_hidden.chunk(3, 1)
    r = (r_input + r_hidden).sigmoid()
    z = (z_input + z_hidden).sigmoid()
    n = (n_input + r * n_hidden).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, n_hidden], 1)


@equivalent("aten::_thnn_fused_gru_cell_backward", source=f"{_CELLS}: gru_cell_backward")
def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    r, z, n, hx, n_hidden = workspace.chunk(5, 1)
    of_n = grad_hy * (1 - z) * (1 - n.square())
    of_z = grad_hy * (hx - n) * z * (1 - z)
    of_r = of_n * n_hidden * r * (1 - r)
    of_input = torch.cat([of_r, of_z, of_n], 1)
    of_hidden = torch.cat([of_r, of_z, of_n * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * z, *biases
