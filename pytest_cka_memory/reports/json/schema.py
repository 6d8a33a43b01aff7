"""The JSON Schema of the report: ``schema.json`` plus the figures of the registry."""

import json
from pathlib import Path
from typing import Any

from pytest_cka_memory.core.figure_rows import Figure
from pytest_cka_memory.core.figures import DERIVED, MEASURED

_TEMPLATE = Path(__file__).with_name("schema.json")
_MEASURED_AFTER = "completed"
_DERIVED_AFTER = "garbage"


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of reports, draft 2020-12."""
    schema: dict[str, Any] = json.loads(_TEMPLATE.read_text(encoding="utf-8"))
    region = schema["$defs"]["region"]
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, described in region["properties"].items():
        properties[name] = described
        required += [name] if name in region["required"] else []
        after = {_MEASURED_AFTER: MEASURED, _DERIVED_AFTER: DERIVED}.get(name, ())
        properties.update({figure.name: _described(figure) for figure in after})
        required += [figure.name for figure in after]
    schema["$defs"]["region"] = {**region, "properties": properties, "required": required}
    return schema


def _described(figure: Figure) -> dict[str, Any]:
    kind = "number" if figure.name.endswith("_per_batch") else "integer"
    described: dict[str, Any] = {
        "type": [kind, "null"] if figure.optional else kind,
        "description": figure.description,
    }
    return {**described, "minimum": 0} if figure.never_negative else described
