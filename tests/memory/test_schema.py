"""The published JSON Schema accepts every report and rejects what is not one."""

import json
from dataclasses import fields, replace

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from reports_made import SESSION, hostile, kept, one_of_each

from pytest_cka_memory.core.record_parts import Refusal
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.reserve import ReservePart
from pytest_cka_memory.core.retention import Holding, ProcessSample, ProcessUse, Sample
from pytest_cka_memory.limits import Breach, Unjudged
from pytest_cka_memory.stored import json_report as json_writer
from pytest_cka_memory.stored.json_report import report_schema

SCHEMA = report_schema()
VALIDATOR = Draft202012Validator(SCHEMA, format_checker=FormatChecker())

OPTIONAL = {"extra", "law", "paths"}
"""Keys that are present only if another plugin added something, or an option asked for them."""


def written(report):
    return json.loads(json_writer.render(report))


def test_the_schema_is_valid_and_names_its_version():
    """The JSON schema is valid in draft 2020-12, and names the version that reports name."""
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["title"] == SCHEMA["properties"]["schema"]["const"] == json_writer.SCHEMA


@pytest.mark.parametrize(
    "report",
    [
        Report(SESSION, ()),
        Report(SESSION, (replace(kept(), extra={"power_w": 250.0}),)),
        one_of_each(),
        hostile(),
    ],
    ids=["empty", "extra", "each", "hostile"],
)
def test_every_report_matches_the_schema(report):
    """Every report matches the schema, also an empty one and one with hostile texts."""
    VALIDATOR.validate(written(report))


def test_the_schema_describes_exactly_the_keys_of_a_report():
    """The schema has exactly the keys of a report, so each new field must be added to it."""
    report = written(one_of_each())
    described = {name: set(part["properties"]) for name, part in SCHEMA["$defs"].items()}
    assert set(report) == set(SCHEMA["properties"])
    assert set(report["session"]) == described["session"]
    for region in report["regions"]:
        assert set(region) == described["region"] - OPTIONAL
    for name, kind in {
        "sample": Sample,
        "holding": Holding,
        "breach": Breach,
        "unjudged": Unjudged,
        "process": ProcessUse,
        "process_sample": ProcessSample,
        "reserve_part": ReservePart,
        "refusal": Refusal,
    }.items():
        assert {field.name for field in fields(kind)} == described[name]


@pytest.mark.parametrize("name", sorted(SCHEMA["$defs"]))
def test_every_key_in_the_schema_is_required_and_described(name):
    """In the schema every key has a description, and is required unless OPTIONAL names it."""
    part = SCHEMA["$defs"][name]
    assert set(part["required"]) == set(part["properties"]) - OPTIONAL
    for key, kind in part["properties"].items():
        assert kind["description"].endswith("."), key


@pytest.mark.parametrize(
    "damage",
    [
        lambda report: report.update(schema="pytest-cka-memory/2"),
        lambda report: report.pop("regions"),
        lambda report: report["regions"][0].update(peak_bytes=1.5),
        lambda report: report["regions"][0].update(peak_bytes=-1),
        lambda report: report["regions"][0].pop("timeline"),
        lambda report: report["regions"][0].update(verdict="fine"),
        lambda report: report["regions"][1]["breaches"][0].update(limit=None),
        lambda report: report["regions"][0]["timeline"][0].update(batch=0),
        lambda report: report["session"].update(workers="one"),
    ],
    ids=["newer", "no-regions", "fraction", "negative", "gone", "word", "null", "zero", "text"],
)
def test_a_damaged_report_does_not_match_the_schema(damage):
    """A report that was damaged no longer matches the schema."""
    report = written(one_of_each())
    VALIDATOR.validate(report)
    damage(report)
    assert not VALIDATOR.is_valid(report)


def test_unknown_keys_match_the_schema():
    """Within a version of the schema keys are only added, so unknown keys match."""
    report = written(one_of_each())
    report["regions"][0]["new_bytes"] = 1
    report["session"]["new"] = "fact"
    VALIDATOR.validate(report)
