"""The JSON report, schema ``pytest-cka-memory/1``."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_cka_memory.results import Result

SCHEMA = "pytest-cka-memory/1"


def text(session: Mapping[str, Any], results: Sequence[Result], missing: Sequence[str]) -> str:
    """Return the whole report: the session, every region, and the tests without a result."""
    report = {
        "schema": SCHEMA,
        "session": dict(session),
        "regions": [result.to_dict() for result in results],
        "missing": list(missing),
    }
    return json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
