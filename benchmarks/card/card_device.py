"""What a real card says of itself, and what its memory holds beside torch's reserve.

    python benchmarks/card/card_device.py

Prints one line of JSON: attributes, properties, the description that cuDNN plans with, and the
memory of the context and of kernels as they are loaded. Nothing else may use the card meanwhile.
"""

import ctypes
import json
import subprocess
from typing import Any

import torch

_DEVICE, _HANDLE, _JSON = 38, 2701, 2702  # numbers of cuDNN's interface
_TYPE_HANDLE, _TYPE_TEXT = 0, 24
_ATTRIBUTES = 150


def cudnn_description() -> str:
    """Return the text that cuDNN makes of the card, from which it can plan without one.

    Raises:
        RuntimeError: if cuDNN refuses it.
    """
    library = ctypes.CDLL("libcudnn.so.9")
    handle, described = ctypes.c_void_p(), ctypes.c_void_p()
    length = ctypes.c_int64()
    text = ctypes.create_string_buffer(8192)
    for status in (
        library.cudnnCreate(ctypes.byref(handle)),
        library.cudnnBackendCreateDescriptor(_DEVICE, ctypes.byref(described)),
        library.cudnnBackendSetAttribute(
            described, _HANDLE, _TYPE_HANDLE, ctypes.c_int64(1), ctypes.byref(handle)
        ),
        library.cudnnBackendFinalize(described),
        library.cudnnBackendGetAttribute(
            *(described, _JSON, _TYPE_TEXT, ctypes.c_int64(8192)), ctypes.byref(length), text
        ),
    ):
        if status:
            raise RuntimeError(f"cuDNN: status {status}")
    return text.value.decode()


def _smi() -> int:
    text = subprocess.check_output(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], text=True
    )
    return int(text.splitlines()[0])


def context() -> dict[str, Any]:
    """Return bytes beside the reserve, and MiB that nvidia-smi shows, after each step."""
    before = _smi()
    torch.cuda.init()
    torch.empty(1, device="cuda")
    found: dict[str, Any] = {}

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
    torch.nn.functional.scaled_dot_product_attention(
        *[torch.randn(2, 4, 128, 64, device="cuda").half()] * 3
    )
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
    total = torch.cuda.mem_get_info()[1]
    return {"total": total, "smi_before_mib": before, "moments": found}


def main() -> None:
    """Print all of it."""
    beside = context()
    torch.nn.Conv2d(3, 3, 3).cuda()(torch.randn(1, 3, 9, 9, device="cuda"))
    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "properties": {
            name: str(getattr(properties, name))
            for name in dir(properties)
            if name[0] != "_" and name != "uuid"
        }
    }
    try:
        found["cudnn"] = cudnn_description()
    except (RuntimeError, OSError) as error:
        found["cudnn"] = repr(error)
    driver = ctypes.CDLL("libcuda.so.1")
    attributes = {}
    for number in range(1, _ATTRIBUTES):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0) == 0:
            attributes[number] = value.value
    found["attributes"] = attributes
    found["context"] = beside
    print(json.dumps(found))


if __name__ == "__main__":
    main()
