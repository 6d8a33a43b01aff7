"""The comparison of two reports for a terminal, as Markdown, as JSON and as an HTML page.

The page, which has no script, also lists what is new at the peaks.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from pytest_cka_memory.core.conditions import listed
from pytest_cka_memory.core.figures import COMPARED
from pytest_cka_memory.core.two_reports import (
    Change,
    Comparison,
    PeakChange,
    PeakDifference,
    RegionKey,
)
from pytest_cka_memory.reports import (
    code,
    fitted,
    html,
    laid_out,
    markdown,
    one_line,
    sentence,
    summary,
)
from pytest_cka_memory.reports.tables import share_of_change
from pytest_cka_memory.units import counted, format_size, format_with_unit

_MOST_ROWS = 200
"""Rows in a terminal; Markdown is limited by its characters."""
_MOST_PAGE_ROWS = 1000
"""Rows of a page: of changed figures, and of lines for one region."""
_MOST_NAMED = 10
_LEAST_NAME = 16


class ChangeCells(NamedTuple):
    """The cells of a changed figure, in the order of their columns."""

    figure: str
    old: str
    new: str
    change: str
    verdict: str


def verdict(comparison: Comparison) -> str:
    """Return the outcome in one line."""
    worse = len({change.key for change in comparison.regressions})
    regions = counted(comparison.compared, "region")
    number = f"{worse:,}" if worse else "none"
    outcome = f"{number} of {regions} rose by more than {comparison.tolerance.text}"
    lists = {
        "new": comparison.appeared,
        "gone": comparison.vanished,
        "not judged": comparison.incomplete,
    }
    return ", ".join([outcome, *(f"{len(keys):,} {what}" for what, keys in lists.items() if keys)])


def as_table(comparison: Comparison, width: int = 100) -> str:
    """Return lines for a terminal: every change, regressions first.

    Names of regions are shortened if the table would be wider than `width` characters.
    """
    changes = _one_of_each_test(comparison.changes, _MOST_ROWS)
    rows = [ChangeCells._fields, *map(cells, changes)]
    lines = []
    if changes:
        others = sum(2 + max(map(len, column)) for column in zip(*rows, strict=True))
        room = max(_LEAST_NAME, width - others)
        names = fitted([one_line(change.key.name) for change in changes], room)
        lines = laid_out(
            [(name, *row) for name, row in zip(["region", *names], rows, strict=True)],
            "llrrrl",
        )
        more = len(comparison.changes) - _MOST_ROWS
        lines += [f"and {more:,} more; --format json prints all", ""] if more > 0 else [""]
    lines += [one_line(remark) for remark in remarks(comparison)]
    return "\n".join([*lines, f"compared: {verdict(comparison)}", ""])


def as_markdown(comparison: Comparison) -> str:
    """Return GitHub-flavoured Markdown, short enough for a comment."""
    is_long = len(comparison.changes) > _MOST_ROWS
    changes = _one_of_each_test(comparison.changes) if is_long else comparison.changes
    rows = [(code(change.key.name), cells(change)) for change in changes]
    lines = [f"### Memory compared: {sentence(verdict(comparison))}", ""]
    if rows:
        # Words come first, because figures are aligned to the right.
        lines += markdown.table(
            ("region", "verdict", *ChangeCells._fields[:-1]),
            [(name, row.verdict, *row[:-1]) for name, row in rows],
            markdown.COMMENT_CHARACTERS * 2 // 3,
            left=3,
        )
    lines += [f"- {sentence(remark)}" for remark in remarks(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def as_json(comparison: Comparison) -> str:
    """Return all of it as JSON."""
    plain = {
        "tolerance": comparison.tolerance.text,
        "compared": comparison.compared,
        "regressions": len(comparison.regressions),
        "changes": [
            {
                **change.key._asdict(),
                **asdict(change.difference),
                "regression": change.difference.broken,
            }
            for change in comparison.changes
        ],
        "not_judged": [key._asdict() for key in comparison.incomplete],
        "appeared": [key._asdict() for key in comparison.appeared],
        "vanished": [key._asdict() for key in comparison.vanished],
        "figures_not_compared": list(comparison.not_on_both),
        "figures_undecided": list(comparison.undecided),
        "conditions": [fact._asdict() for fact in comparison.changed],
        "differing": [{"old": old, "new": new} for old, new in comparison.devices],
    }
    return json.dumps(plain, indent=1) + "\n"


def as_html(comparison: Comparison, peaks: Sequence[PeakDifference], unknown: int) -> str:
    """Return the page as HTML.

    Args:
        comparison: the comparison of figures.
        peaks: what is new at the peaks.
        unknown: number of regions for which a report does not list what was live at the peak.
    """
    more = len(comparison.changes) - _MOST_PAGE_ROWS
    note = f"and {more:,} more" if more > 0 else ""
    changes = _one_of_each_test(comparison.changes, _MOST_PAGE_ROWS)
    figures = html.table(
        _FIGURES, map(_figure_row, changes), note if changes else "No figure has changed."
    )
    listed = "".join(f"<li>{html.text(remark)}</li>" for remark in remarks(comparison))
    main = [
        "<h2>What is new at the peak</h2>",
        *map(_peak_table, peaks),
        _NOT_KNOWN.format(unknown, counted(comparison.compared, "region")) if unknown else "",
        f"<h2>Figures that changed</h2>{figures}<ul>{listed}</ul>{_LEGEND}",
    ]
    return html.plain_page("Memory compared", verdict(comparison), "\n".join(main))


_SIZES = {"Old": "", "New": "", "Change": ""}
_FIGURES = {"Region": "name", "Figure": "word", **_SIZES, "Verdict": "word"}
_AT_PEAK = {"Line and module": "name", "Kind": "word", **_SIZES}
_NOT_KNOWN = (
    "<p class='legend'>Not known for {:,} of {}: a report lists what was live at the peak "
    "only for broken peak limits. To list it for every region, run pytest with "
    "<code>--cka-memory-explain</code>.</p>"
)
_LEGEND = (
    "<p class='legend'>Sizes are in MB (2**20 bytes) unless a unit is given. Lines are those of "
    "the new report; a line that has only moved in its function is the same.</p>"
)


def _figure_row(change: Change) -> Sequence[str]:
    row = cells(change)
    style = {"REGRESSION": "breach", "less": "ok"}.get(row.verdict, "no-limit")
    name, figure = html.text(change.key.name), html.text(row.figure)
    mark = f"<span class='verdict {style}'>{row.verdict}</span>"
    return (f"<code>{name}</code>", figure, row.old, row.new, row.change, mark)


def _peak_table(peak: PeakDifference) -> str:
    old, new = format_with_unit(peak.old_bytes), format_with_unit(peak.new_bytes)
    head = f"<h3><code>{html.text(peak.key.name)}</code></h3><p>peak {old}, now {new}</p>"
    rows = map(_peak_row, peak.changes[:_MOST_PAGE_ROWS])
    return f"{head}\n{html.table(_AT_PEAK, rows)}"


def _peak_row(change: PeakChange) -> Sequence[str]:
    origin = change.origin
    source = f"<br><code>{html.text(origin.code)}</code>" if origin.code else ""
    module = f"<br>in <code>{html.text(origin.module)}</code>" if origin.module else ""
    sign, style = ("+", "breach") if change.rise_bytes > 0 else ("-", "ok")
    word = "new" if not change.old_bytes else "gone" if not change.new_bytes else ""
    mark = f" <span class='verdict {style}'>{word}</span>" if word else ""
    return (
        f"<code>{html.text(change.line)}</code>{source}{module}",
        html.text(origin.kind or "-"),
        format_size(change.old_bytes),
        format_size(change.new_bytes),
        f"{sign}{format_size(abs(change.rise_bytes))}{mark}",
    )


def cells(change: Change) -> ChangeCells:
    """Return the cells of one change."""
    old, new = change.difference.old_bytes, change.difference.new_bytes
    is_broken, rose = change.difference.broken, new is None or new > old
    return ChangeCells(
        figure=COMPARED[change.difference.figure].noun,
        old=format_size(old),
        new=format_size(new),
        change="-" if new is None else share_of_change(old, new),
        verdict="REGRESSION" if is_broken else "within" if rose else "less",
    )


def _one_of_each_test(changes: Sequence[Change], most: int | None = None) -> Sequence[Change]:
    """Return regressions first, then one change of each test before any second.

    Args:
        changes: all changes.
        most: how many to return; if there are not more, they keep their order. None means all.
    """
    if most is not None and len(changes) <= most:
        return changes
    ordered = summary.first_of_each(changes, lambda change: change.key.nodeid)
    ordered.sort(key=lambda change: not change.difference.broken)
    return ordered[:most]


def remarks(comparison: Comparison) -> Iterator[str]:
    """Yield what differs besides figures, and what was not compared, a sentence for each.

    Of regions that are only in one report the first ten are named, and the others counted.
    """
    for old, new in comparison.devices:
        yield f"warning: the reports differ in more than the code: measured on {old}, now on {new}"
    if comparison.undecided:
        nouns = ", ".join(COMPARED[figure].noun for figure in comparison.undecided)
        yield (
            f"{nouns}: not compared, because the reports differ in {listed(comparison.changed)}. "
            "All other figures are compared. To compare all figures, measure both reports on one "
            "machine with the same settings"
        )
    if comparison.not_on_both:
        nouns = ", ".join(COMPARED[figure].noun for figure in comparison.not_on_both)
        these = "this figure" if len(comparison.not_on_both) == 1 else "these figures"
        yield f"{nouns}: not compared, because only one of the devices has {these}"
    yield from _named("only in the new report", comparison.appeared)
    yield from _named("only in the old report", comparison.vanished)
    yield from _named("not compared, because an exception ended it", comparison.incomplete)


def _named(what: str, keys: Sequence[RegionKey]) -> Iterator[str]:
    yield from (f"{what}: {key.name}" for key in keys[:_MOST_NAMED])
    if len(keys) > _MOST_NAMED:
        yield f"{what}: {len(keys) - _MOST_NAMED:,} more"
