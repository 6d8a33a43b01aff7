"""Attention of cuDNN, which cuDNN cannot plan without a GPU.

Torch prefers it on an H100 and newer cards. With it switched off, torch uses flash attention.
"""

from __future__ import annotations

from typing import Any

OPERATORS = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_cudnn_attention_forward",
    "aten::_cudnn_attention_backward",
)
_libraries: list[Any] = []  # torch removes the kernels of one that is not referenced


def switch_off() -> None:
    """Let torch choose another implementation."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def refuse_calls() -> None:
    """Let the operators of cuDNN's attention raise an error that says what to do."""
    import torch

    from emulated_cuda import torch_private

    with torch_private.unreported_overrides():
        for name in OPERATORS:
            namespace, _, rest = name.partition("::")
            if hasattr(getattr(torch.ops, namespace), rest):
                library = torch.library.Library(namespace, "IMPL")
                library.impl(rest, refuse, "CUDA", with_keyset=True, allow_override=True)
                _libraries.append(library)


def refuse(keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise in place of an operator of cuDNN's attention.

    Raises:
        RuntimeError: says what to do.
    """
    raise RuntimeError(
        "cuDNN's attention is not supported by the emulated device, because cuDNN cannot plan it "
        "without a GPU. Leave out SDPBackend.CUDNN_ATTENTION and enable_cudnn_sdp(True): PyTorch "
        "then uses flash attention"
    )
