"""The JSON report, schema ``pytest-cka-memory/1``, which ``schema.json`` beside it describes."""

import json
from functools import partial
from pathlib import Path

from pytest_cka_memory.core.verdicts import Report

SCHEMA = "pytest-cka-memory/1"
SCHEMA_FILE = Path(__file__).with_name("schema.json")
"""The report's JSON Schema, draft 2020-12."""

_on_a_line = partial(json.dumps, ensure_ascii=False, allow_nan=False)
_in_lines = partial(_on_a_line, indent=1)  # many times slower


def text(report: Report) -> str:
    """Return the whole report: the session, a line per region, and what is not among them."""
    head = _in_lines({"schema": SCHEMA, "session": dict(report.session)})
    regions = ",\n".join(f"  {_on_a_line(result.to_dict())}" for result in report.results)
    rest = {
        "problems": list(report.problems),
        "missing": list(report.missing),
        "unmeasured": dict(report.unmeasured),
    }
    return (
        head.removesuffix("\n}")
        + f',\n "regions": [\n{regions}\n ],\n'
        + _in_lines(rest).removeprefix("{\n")
        + "\n"
    )
