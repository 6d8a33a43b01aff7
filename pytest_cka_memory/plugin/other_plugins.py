"""Limits, and fields of regions, that other plugins add by hooks; checks what they return.

Imported with the first test that may have limits, or for which a plugin adds fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.verdicts import Breach, Limit, Result, Unjudged, Verdict
from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.limits import FlatPerBatch, Maximum
from pytest_cka_memory.plugin.pytest_private import fail
from pytest_cka_memory.units import is_plain_number

LIMITS = "pytest_cka_memory_limits"
REGION = "pytest_cka_memory_region"
_DEEPEST = 20
"""Levels of lists and dicts in a field that another plugin adds."""
_of_plugins_key = pytest.StashKey["list[Limit] | LimitError"]()


def _call_each(
    hook: str, error: type[Exception], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Call a hook of one plugin at a time; yield the plugin's name and what it returned."""
    item = arguments["item"]
    implementations = getattr(item.ihook, hook).get_hookimpls()
    plugins = [implementation.plugin for implementation in implementations]
    for implementation in implementations:
        others = [plugin for plugin in plugins if plugin is not implementation.plugin]
        caller = item.config.pluginmanager.subset_hook_caller(hook, others)
        try:
            returned = caller(**arguments)
        except Exception as raised:
            problem = f"{hook} raised {type(raised).__name__}: {raised}"
            raise error(f"{implementation.plugin_name}: {problem}") from raised
        yield from ((implementation.plugin_name, value) for value in returned)


def limits_of_plugins(item: pytest.Item) -> list[Limit]:
    """Return the limits that other plugins set for `item`; calls the hook once per test.

    Raises:
        LimitError: if a plugin returns something else than a list of limits; it names the plugin
            and the hook.
    """
    if _of_plugins_key not in item.stash:
        try:
            item.stash[_of_plugins_key] = list(_limits_from_hook(item))
        except LimitError as error:
            item.stash[_of_plugins_key] = error
    limits = item.stash[_of_plugins_key]
    if isinstance(limits, LimitError):
        raise limits
    return limits


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


@dataclass(frozen=True)
class PluginLimit(Limit):
    """Wraps a limit of another plugin and checks the type of each verdict.

    Otherwise a wrong one would pass silently.
    """

    inner: Limit
    plugin_name: str

    @property
    def addition(self) -> str:
        return str(self.inner.addition)

    @property
    def judges_device(self) -> bool:
        return bool(self.inner.judges_device)

    def judge(self, record: RegionRecord) -> Verdict:
        raise NotImplementedError(
            "a limit of a plugin may have several verdicts; call verdicts() instead of judge()"
        )

    def verdicts(self, record: RegionRecord) -> Sequence[Verdict]:
        try:
            verdicts = list(self.inner.verdicts(record))
        except Exception as error:
            self._fail(f"raised {type(error).__name__}: {error}")
        for verdict in verdicts:
            if not _is_verdict(verdict):
                self._fail(
                    f"returned {verdict!r}; return None, Unjudged(...) or Breach(...); in these, "
                    "each text must be a str and each size a finite int or float (not a bool or a "
                    "NumPy number)"
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
        and is_plain_number(value.allowed_bytes)
        and (value.measured_bytes is None or is_plain_number(value.measured_bytes))
    )


def with_fields(item: pytest.Item, result: Result, mistakes: list[str]) -> Result:
    """Return `result` with the fields that other plugins add; add theirs to `mistakes`."""
    try:
        fields = _fields_of(item, result)
        return replace(result, extra=fields) if fields else result
    except FieldError as error:
        mistakes.append(str(error))
        return result


class FieldError(Exception):
    """A field that cannot be reported; the message names its plugin and what to return instead."""


def _fields_of(item: pytest.Item, result: Result) -> dict[str, Any]:
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
    return value is None or type(value) in (str, bool) or is_plain_number(value)
