"""What other plugins and conftest files add: limits for a test, fields for a region."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.errors import LimitError
from pytest_cka_memory.limits import Breach, FlatPerBatch, Limit, Maximum, Unjudged, Verdict

LIMITS = "pytest_cka_memory_limits"
REGION = "pytest_cka_memory_region"

_DEEPEST = 20
_limits_key = pytest.StashKey["list[Limit] | LimitError"]()


class FieldError(Exception):
    """A field that cannot be reported; says whose it is, and what to return instead."""


@dataclass(frozen=True)
class PluginLimit(Limit):
    """Another plugin's limit, whose verdicts are looked at: a wrong one would pass as kept."""

    inner: Limit
    owner: str

    def judge(self, record: RegionRecord) -> Verdict:
        raise NotImplementedError("a plugin's limit may have several verdicts")

    def verdicts(self, record: RegionRecord) -> Sequence[Verdict]:
        try:
            verdicts = list(self.inner.verdicts(record))
        except Exception as error:
            self._refuse(f"raised {type(error).__name__}: {error}")
        for verdict in verdicts:
            if not _is_verdict(verdict):
                self._refuse(
                    f"judged {verdict!r}; return None, an Unjudged, or a Breach of texts and "
                    "plain numbers"
                )
        return verdicts

    def _refuse(self, wrong: str) -> None:
        # Here, for it is asked while a region ends, where nobody waits for an error.
        pytest.fail(f"{self.owner}: {LIMITS}: limit {self.text} {wrong}", pytrace=False)


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


def limits_of(item: pytest.Item) -> list[Limit]:
    """Limits that others set for `item`; asked once a test.

    Raises:
        LimitError: for what is no list of limits; it names the plugin and the hook.
    """
    if not getattr(item.config.hook, LIMITS).get_hookimpls():  # for thousands of unmarked tests
        return []
    if _limits_key not in item.stash:
        try:
            item.stash[_limits_key] = list(_asked_limits(item))
        except LimitError as error:
            item.stash[_limits_key] = error
    found = item.stash[_limits_key]
    if isinstance(found, LimitError):
        raise found
    return found


def gives_limits(item: pytest.Item) -> bool:
    """Whether others set limits for `item`, wrong ones included: its run will say what is wrong."""
    try:
        return bool(limits_of(item))
    except LimitError:
        return True


def _asked_limits(item: pytest.Item) -> Iterator[Limit]:
    for owner, answer in _answers(LIMITS, LimitError, {"item": item}):
        if not isinstance(answer, (list, tuple)) or not all(map(_is_limit, answer)):
            raise LimitError(
                f"{owner}: {LIMITS} returned {answer!r}; return a list of limits, "
                "e.g. [pytest_cka_memory.limits.max_peak_mb(512)]"
            )
        for limit in answer:
            ours = type(limit) in (Maximum, FlatPerBatch)
            yield limit if ours else PluginLimit(limit.text, limit, owner)


def _is_limit(value: object) -> bool:
    return isinstance(value, Limit) and type(value.text) is str


def fields_of(item: pytest.Item, result: Result) -> dict[str, Any]:
    """Fields that others add to a region.

    Raises:
        FieldError: for what cannot cross processes or stand in JSON; it names plugin and hook.
    """
    fields: dict[str, Any] = {}
    for owner, answer in _answers(REGION, FieldError, {"item": item, "result": result}):
        wrong = _wrong_fields(answer, fields)
        if wrong:
            raise FieldError(f"{owner}: {REGION} returned {wrong}")
        fields.update(answer)
    return fields


def _wrong_fields(answer: object, taken: Mapping[str, Any]) -> str:
    if type(answer) is not dict:
        return f"{answer!r}; return a dict of fields, or None"
    twice = sorted(key for key in answer if key in taken)
    if twice:
        return f"{twice[0]!r}, which another plugin has returned too; write a name of your own"
    bad = next((key for key, value in answer.items() if not _is_plain({key: value})), None)
    if bad is None:
        return ""
    return (
        f"{bad!r}: {answer[bad]!r}; fields are texts, finite numbers, bools, None, or lists and "
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


def _answers(
    hook: str, error: type[Exception], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Each plugin's name and answer, so that a wrong one can be told whose it is."""
    item = arguments["item"]
    implementations = getattr(item.ihook, hook).get_hookimpls()
    plugins = [implementation.plugin for implementation in implementations]
    for implementation in implementations:
        others = [plugin for plugin in plugins if plugin is not implementation.plugin]
        one = item.config.pluginmanager.subset_hook_caller(hook, others)
        try:
            answers = one(**arguments)
        except Exception as raised:
            said = f"{hook} raised {type(raised).__name__}: {raised}"
            raise error(f"{implementation.plugin_name}: {said}") from raised
        yield from ((implementation.plugin_name, answer) for answer in answers)
