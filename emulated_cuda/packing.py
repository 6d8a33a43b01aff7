"""JSON in which bytes may stand: how processes of this project send arrays to each other."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

_BYTES = "base64"


def packed(value: Any) -> bytes:
    """Return builtin types, with bytes among them, as one line of ASCII.

    >>> unpacked(packed({"sizes": b"12", "names": ["a"]}))
    {'sizes': b'12', 'names': ['a']}
    """
    return json.dumps(value, default=_as_text, separators=(",", ":")).encode("ascii")


def _as_text(value: Any) -> dict[str, str]:
    return {_BYTES: b64encode(value).decode("ascii")}


def unpacked(text: bytes) -> Any:
    """Return what :func:`packed` was given; tuples are lists.

    Raises:
        ValueError: if it is something else.
    """
    return json.loads(text, object_hook=_as_bytes)


def _as_bytes(mapping: dict[str, Any]) -> Any:
    return b64decode(mapping[_BYTES]) if mapping.keys() == {_BYTES} else mapping
