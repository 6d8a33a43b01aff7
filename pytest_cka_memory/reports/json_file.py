"""The JSON report, schema ``pytest-cka-memory/1``."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_cka_memory.results import Result

SCHEMA = "pytest-cka-memory/1"


def text(
    session: Mapping[str, Any],
    results: Sequence[Result],
    missing: Sequence[str],
    unmeasured: Mapping[str, int],
) -> str:
    """Return the whole report: the session, every region, and what is not among them.

    That is the tests without a result, and why others could not be measured, with their number.
    """
    report = {
        "schema": SCHEMA,
        "session": dict(session),
        "regions": [result.to_dict() for result in results],
        "missing": list(missing),
        "unmeasured": dict(unmeasured),
    }
    return json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
