"""The limits on a test that come from other tests or other plugins."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.markers import RELATIONS
from pytest_cka_memory.core.verdicts import Breach, Limit, Result, Unjudged, Verdict
from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.limits import FlatPerBatch, Maximum
from pytest_cka_memory.plugin.device import known_meter
from pytest_cka_memory.plugin.pytest_private import fail, parameter_ids

if TYPE_CHECKING:
    from pytest_cka_memory.core.relations import ComparedRegion
    from pytest_cka_memory.core.tolerance import Tolerance


_compared_key = pytest.StashKey[dict[str, "dict[str, ComparedRegion]"]]()
"""Test -> label -> region, of the tests with which others are compared."""
_additions_key = pytest.StashKey[dict[str, set[str]]]()
"""Test -> what must be measured in addition, because others are compared with it."""


_Siblings = dict[tuple[str, ...], pytest.Item]
_functions_key = pytest.StashKey[tuple[int, dict[tuple[int, str], _Siblings]]]()
"""The number of tests, and the tests of each function of a module or class."""


def limits_of_relations(
    item: pytest.Item, arguments: Mapping[str, Any], text: str, tolerance: "Tolerance"
) -> "list[Limit]":
    """Return the limits on a test that is compared with others; none for such another test itself.

    Args:
        item: the test.
        arguments: those of its marker. A name in them is the id of a parameter: the other test has
            it, and the same other parameters.
        text: the marker as the user writes it.
        tolerance: how far a figure may rise above that of the other test.

    Raises:
        LimitError: if there is no such test, or an argument is wrong.
    """
    from pytest_cka_memory.core.relations import RelationLimit, relations_of

    given = {name: value for name, value in arguments.items() if name in RELATIONS}
    limits: list[Limit] = []
    meter = known_meter(item.config)
    facts = {} if meter is None else meter.facts()
    for relation in relations_of(**given, tolerance=tolerance):
        other = _other_of(item, relation.other)
        if other is None:
            argument = next(name for name, value in given.items() if relation.other in str(value))
            raise LimitError(
                f"{argument}={given[argument]!r}: no test of this function with the parameter "
                f"{relation.other!r}, and otherwise the same parameters, was collected; write the "
                "id of a parameter, and select both tests"
            )
        known = item.config.stash.setdefault(_compared_key, {}).setdefault(other.nodeid, {})
        limit = RelationLimit(text, relation, other.nodeid, partial(_find, known), facts)
        additions = item.config.stash.setdefault(_additions_key, {})
        additions.setdefault(other.nodeid, set()).update({limit.addition} - {""})
        if other is not item:
            limits.append(limit)
    return limits


def _find(known: "Mapping[str, ComparedRegion]", label: str) -> "ComparedRegion | None":
    return known.get(label)


def additions_for_others(item: pytest.Item) -> set[str]:
    """Return what is measured of a test in addition, because others are compared with it."""
    return item.config.stash.get(_additions_key, {}).get(item.nodeid, set())


def note(item: pytest.Item, records: "Iterable[RegionRecord]", facts: Mapping[str, Any]) -> None:
    """Keep the figures of a test if others are compared with it."""
    known = item.config.stash.get(_compared_key, {}).get(item.nodeid)
    if known is not None:
        from pytest_cka_memory.core.relations import ComparedRegion

        known.update({it.label: ComparedRegion(it, facts) for it in records if it.completed})


def pending(limits: "Iterable[Limit]", records: "Sequence[RegionRecord]") -> list[dict[str, Any]]:
    """Return the relations that can only be judged when other tests have run."""
    found = []
    for limit in limits:
        if hasattr(limit, "pending"):
            found += [it for record in records if (it := limit.pending(record)) is not None]
    return found


def _other_of(item: pytest.Item, name: str) -> pytest.Item | None:
    """Return the test with one parameter replaced by `name`; the test itself if it has that one."""
    ids = tuple(parameter_ids(item))
    if name in ids:
        return item
    siblings = _siblings_of(item)
    replaced = ((*ids[:at], name, *ids[at + 1 :]) for at in range(len(ids)))
    return next((siblings[found] for found in replaced if found in siblings), None)


def _siblings_of(item: pytest.Item) -> "_Siblings":
    """Return the tests of the same function by their parameters."""
    count, functions = item.session.stash.get(_functions_key, (0, {}))
    if count != len(item.session.items):  # others were selected since
        functions = {}
        for other in item.session.items:
            function = (id(other.parent), getattr(other, "originalname", ""))
            functions.setdefault(function, {})[tuple(parameter_ids(other))] = other
        item.session.stash[_functions_key] = len(item.session.items), functions
    return functions.get((id(item.parent), getattr(item, "originalname", item.name)), {})


LIMITS = "pytest_cka_memory_limits"
REGION = "pytest_cka_memory_region"

_DEEPEST = 20
_limits_key = pytest.StashKey["list[Limit] | LimitError"]()


class FieldError(Exception):
    """A field that cannot be reported; the message names its plugin and what to return instead."""


@dataclass(frozen=True)
class PluginLimit(Limit):
    """Another plugin's limit; its verdicts are checked, because an invalid one would not fail."""

    inner: Limit
    plugin_name: str

    @property
    def addition(self) -> str:
        return str(self.inner.addition)

    @property
    def judges_device(self) -> bool:
        return bool(self.inner.judges_device)

    def judge(self, record: RegionRecord) -> Verdict:
        raise NotImplementedError("a plugin's limit may have several verdicts")

    def verdicts(self, record: RegionRecord) -> Sequence[Verdict]:
        try:
            verdicts = list(self.inner.verdicts(record))
        except Exception as error:
            self._fail(f"raised {type(error).__name__}: {error}")
        for verdict in verdicts:
            if not _is_verdict(verdict):
                self._fail(
                    f"returned {verdict!r}; return None, an Unjudged, or a Breach of texts and "
                    "plain numbers"
                )
        return verdicts

    def _fail(self, wrong: str) -> None:
        # Fails the test at once, because no caller at the end of a region handles an exception.
        fail(f"{self.plugin_name}: {LIMITS}: limit {self.text} {wrong}")


def _is_verdict(value: object) -> bool:
    if value is None:
        return True
    if isinstance(value, Unjudged):
        return type(value.limit) is type(value.reason) is str
    return (
        isinstance(value, Breach)
        and all(type(text) is str for text in (value.limit, value.message, value.figure))
        and _is_number(value.allowed_bytes)
        and (value.measured_bytes is None or _is_number(value.measured_bytes))
    )


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def limits_of_plugins(item: pytest.Item) -> list[Limit]:
    """Return the limits that other plugins set for `item`; calls the hook once per test.

    Raises:
        LimitError: if a plugin returns something else than a list of limits; it names the plugin
            and the hook.
    """
    if _limits_key not in item.stash:
        try:
            item.stash[_limits_key] = list(_limits_from_hook(item))
        except LimitError as error:
            item.stash[_limits_key] = error
    found = item.stash[_limits_key]
    if isinstance(found, LimitError):
        raise found
    return found


def _limits_from_hook(item: pytest.Item) -> Iterator[Limit]:
    for plugin_name, returned in _call_each(LIMITS, LimitError, {"item": item}):
        if not isinstance(returned, (list, tuple)) or not all(map(_is_limit, returned)):
            raise LimitError(
                f"{plugin_name}: {LIMITS} returned {returned!r}; return a list of limits, "
                "e.g. [pytest_cka_memory.limits.max_peak_mb(512)]"
            )
        for limit in returned:
            ours = type(limit) in (Maximum, FlatPerBatch)
            yield limit if ours else PluginLimit(limit.text, limit, plugin_name)


def _is_limit(value: object) -> bool:
    return isinstance(value, Limit) and type(value.text) is str


def fields_of(item: pytest.Item, result: Result) -> dict[str, Any]:
    """Return the fields that other plugins add to a region.

    Raises:
        FieldError: if a field cannot be written as JSON; it names the plugin and the hook.
    """
    fields: dict[str, Any] = {}
    arguments = {"item": item, "result": result}
    for plugin_name, returned in _call_each(REGION, FieldError, arguments):
        problem = _problem_of_fields(returned, fields)
        if problem:
            raise FieldError(f"{plugin_name}: {REGION} returned {problem}")
        fields.update(returned)
    return fields


def _problem_of_fields(returned: object, others: Mapping[str, Any]) -> str:
    """Return what is wrong with the fields that a plugin returned; empty if nothing is."""
    if type(returned) is not dict:
        return f"{returned!r}; return a dict of fields, or None"
    twice = sorted(key for key in returned if key in others)
    if twice:
        return f"{twice[0]!r}, which another plugin has returned too; use another name"
    bad = next((key for key, value in returned.items() if not _is_plain({key: value})), None)
    if bad is None:
        return ""
    return (
        f"{bad!r}: {returned[bad]!r}; fields are texts, finite numbers, bools, None, or lists and "
        "dicts of these"
    )


def _is_plain(value: object, depth: int = 0) -> bool:
    if depth > _DEEPEST:
        return False
    if type(value) is dict:
        return all(type(k) is str and _is_plain(v, depth + 1) for k, v in value.items())
    if type(value) is list:
        return all(_is_plain(v, depth + 1) for v in value)
    return value is None or type(value) in (str, bool) or _is_number(value)


def _call_each(
    hook: str, error: type[Exception], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Call a hook of one plugin at a time; yield the plugin's name and what it returned."""
    item = arguments["item"]
    implementations = getattr(item.ihook, hook).get_hookimpls()
    plugins = [implementation.plugin for implementation in implementations]
    for implementation in implementations:
        others = [plugin for plugin in plugins if plugin is not implementation.plugin]
        one = item.config.pluginmanager.subset_hook_caller(hook, others)
        try:
            returned = one(**arguments)
        except Exception as raised:
            problem = f"{hook} raised {type(raised).__name__}: {raised}"
            raise error(f"{implementation.plugin_name}: {problem}") from raised
        yield from ((implementation.plugin_name, value) for value in returned)
