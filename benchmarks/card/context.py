"""What a card's memory holds beside torch's reserve, at moments of a process: context, kernels.

    python benchmarks/card/context.py

Prints one line of JSON. Nothing else may use the card meanwhile.
"""

import json
import subprocess

import torch


def _smi() -> int:
    text = subprocess.check_output(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], text=True
    )
    return int(text.splitlines()[0])


def main() -> None:
    """Print bytes beside the reserve, and MiB that nvidia-smi shows, after each step."""
    before = _smi()
    torch.cuda.init()
    torch.empty(1, device="cuda")
    found = {}

    def moment(name: str) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found[name] = {
            "beside_bytes": total - free - torch.cuda.memory_reserved(),
            "smi_mib": _smi() - before,
            "reserved_bytes": torch.cuda.memory_reserved(),
        }

    moment("first tensor")
    x = torch.randn(256, 256, device="cuda")
    moment("random numbers")
    x @ x
    moment("product, float32")
    x.half() @ x.half()
    moment("product, float16")
    torch.nn.functional.scaled_dot_product_attention(*[torch.randn(2, 4, 128, 64, device="cuda").half()] * 3)
    moment("attention")
    conv = torch.nn.Conv2d(3, 64, 3).cuda()
    conv(torch.randn(4, 3, 32, 32, device="cuda")).sum().backward()
    moment("convolution, backward")
    torch.fft.fft(x)
    moment("Fourier transform")
    torch.linalg.inv(x)
    moment("inverse")
    x.sort()
    moment("sort")
    torch.nn.LSTM(64, 64).cuda()(torch.randn(5, 3, 64, device="cuda"))
    moment("LSTM")
    free, total = torch.cuda.mem_get_info()
    print(json.dumps({"total": total, "smi_before_mib": before, "moments": found}))


if __name__ == "__main__":
    main()
