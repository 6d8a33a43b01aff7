"""Write the JSON report, schema ``pytest-cka-memory/1``; :mod:`.schema` describes it."""

import json
from functools import partial
from typing import Any

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import Result

SCHEMA = "pytest-cka-memory/1"

_on_a_line = partial(json.dumps, ensure_ascii=False, allow_nan=False)
_in_lines = partial(_on_a_line, indent=1)  # much slower, so not used for regions


def render(report: Report) -> str:
    """Return the report as JSON text, with one line per region."""
    head = _in_lines({"schema": SCHEMA, "session": dict(report.session)})
    regions = ",\n".join(f"  {_on_a_line(_region(result))}" for result in report.results)
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


def _region(result: Result) -> dict[str, Any]:
    region = result.to_dict()
    del region["memory_timeline"]  # the data of a picture, which only the page draws
    return region
