"""What a session keeps of each region until its end."""

import json

from reports_made import SESSION, one_of_each

from pytest_cka_memory.core.report import ReportBuilder


def test_fields_that_have_nothing_are_not_kept_and_are_read_back():
    """Of a region without batches only its figures are kept; each result is what was added."""
    results = one_of_each().results
    builder = ReportBuilder()
    for result in results:
        sent = json.loads(json.dumps(result.filled()))  # builtin types, to any process
        payload = {"facts": SESSION, "regions": [sent], "unmeasured": []}
        builder.add(result.nodeid, result.worker, result.outcome, {**payload, "narrowed": False})
    assert sorted(builder.results, key=lambda it: it.name) == sorted(
        results, key=lambda it: it.name
    )
    kept = [region for regions in builder._regions.values() for region in regions]
    assert all(value not in (None, []) for region in kept for value in region.values())
    assert [region["completed"] for region in kept] == [it.record.completed for it in results]
