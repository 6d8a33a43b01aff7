"""The tables of benchmarks/README.md: what each script shows, and what renews each result."""

import ast
import re
from pathlib import Path

from renew import TABLES
from tabulate import tabulate

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent / "docs"


def programs() -> str:
    """Each script that measures or draws something, and the pages that name it."""
    rows = [
        (f"`{file.name}`", _summary(file), ", ".join(_pages(file)) or "-")
        for file in sorted(FOLDER.glob("*.py"))
        if _is_program(file)
    ]
    return _markdown(("script", "what it shows", "pages"), rows)


def parts() -> str:
    """Each module that the scripts share."""
    rows = [
        (f"`{file.name}`", _summary(file))
        for file in sorted(FOLDER.glob("*.py"))
        if not _is_program(file)
    ]
    return _markdown(("module", "what it has"), rows)


def results() -> str:
    """Each committed table: its name for ``renew.py``, its script, minutes, and what it needs."""
    rows = [
        (name, f"`{table.script}`" if table.script else "-", str(table.minutes), table.needs or "-")
        for name, table in TABLES.items()
    ]
    return _markdown(("table", "script", "minutes", "needs"), rows)


def _is_program(file: Path) -> bool:
    return 'if __name__ == "__main__":' in file.read_text("utf-8")


def _summary(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return re.sub("`+", "`", " ".join(text.partition("\n\n")[0].split()))


def _pages(file: Path) -> list[str]:
    """Return links to the pages that name a script, or a table that it writes."""
    tables = {name for name, table in TABLES.items() if table.script == file.name}
    links = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        is_named = f"benchmarks/{file.name}" in text
        if "changes" not in page.parts and (
            is_named or any(f"<!-- drawn: {name} -->" in text for name in tables)
        ):
            links.append(f"[{page.stem}](../{page.relative_to(DOCS.parent).as_posix()})")
    return links


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return tabulate(rows, head, tablefmt="github", disable_numparse=True) + "\n"
