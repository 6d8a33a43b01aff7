"""Write the JSON report, schema ``pytest-cka-memory/1``; :mod:`.schema` describes it."""

import json
from functools import partial

from pytest_cka_memory.core.report import Report

SCHEMA = "pytest-cka-memory/1"

_on_a_line = partial(json.dumps, ensure_ascii=False, allow_nan=False)
_in_lines = partial(_on_a_line, indent=1)  # much slower, so not used for regions


def render(report: Report) -> str:
    """Return the report as JSON text, with one line per region."""
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
