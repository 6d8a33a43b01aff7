"""Write into README and docs what their commands print now: ``python tests/docs/redraw.py``.

Run it after a change of messages or reports, and read the difference before you commit it.
"""

import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def redraw_comparison() -> None:
    """Copy the comparison that ``tests/memory/test_cli.py`` checks into the page on reports."""
    source = (ROOT / "tests" / "memory" / "test_cli.py").read_text("utf-8")
    (table,) = re.findall(r'^TABLE = """\\\n(.*?)"""$', source, re.MULTILINE | re.DOTALL)
    page = ROOT / "docs" / "how-to" / "reports.md"
    head = "<!-- checked by: tests/memory/test_cli.py -->\n```text\n"
    before, _, rest = page.read_text("utf-8").partition(head)
    after = rest.partition("```\n")[2]
    page.write_text(f"{before}{head}{table}```\n{after}", "utf-8")


def redraw_tables() -> None:
    """Draw the tables of the committed results, whose report has the legend of today."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from draw_tables import main

    main()


if __name__ == "__main__":
    redraw_comparison()
    options = "--redraw", "-q", "-p", "no:cacheprovider"
    status = pytest.main([str(HERE / "test_pages.py"), *options])
    redraw_tables()
    sys.exit(status)
