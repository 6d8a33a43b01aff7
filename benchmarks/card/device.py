"""What a real card says of itself: attributes, properties, and the description cuDNN plans with.

    python benchmarks/card/device.py

Prints one line of JSON.
"""

import ctypes
import json

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


def main() -> None:
    """Print all of it."""
    torch.nn.Conv2d(3, 3, 3).cuda()(torch.randn(1, 3, 9, 9, device="cuda"))
    properties = torch.cuda.get_device_properties(0)
    found: dict[str, object] = {
        "properties": {
            name: str(getattr(properties, name)) for name in dir(properties) if name[0] != "_"
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
    print(json.dumps(found))


if __name__ == "__main__":
    main()
