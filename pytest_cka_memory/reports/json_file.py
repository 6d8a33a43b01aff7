"""The JSON report, schema ``pytest-cka-memory/1``."""

import json

from pytest_cka_memory.results import Report

SCHEMA = "pytest-cka-memory/1"


def text(report: Report) -> str:
    """Return the whole report: the session, every region, and what is not among them."""
    plain = {
        "schema": SCHEMA,
        "session": dict(report.session),
        "regions": [result.to_dict() for result in report.results],
        "missing": list(report.missing),
        "unmeasured": dict(report.unmeasured),
    }
    return json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
