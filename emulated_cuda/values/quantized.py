"""Products of quantized tensors, for which cuDNN finds no plan without a GPU."""

from __future__ import annotations

from typing import Any

from emulated_cuda.values.operators import Kernel


def refusing(name: str) -> Kernel | None:
    """Return the kernel for an operator on quantized tensors and packed weights.

    None for one that only packs or unpacks a weight: torch's own kernel does that on the CPU.
    """
    if "pack" in name:
        return None

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name} is not supported by the emulated device, because cuDNN cannot plan it without "
            f"a GPU. Compute it on the CPU, with the packed weight and the input there, or "
            f"dequantize() both and use the floating-point form, or use a GPU"
        )

    return kernel
