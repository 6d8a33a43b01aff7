"""README and docs as data: their blocks of code, the note above each block, links and anchors.

A block's note is an HTML comment above its fence. It says what the tests do with the
block; ``docs_session.py`` lists the notes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHANGES = ROOT / "docs" / "project" / "changes"
"""What has changed since the last release, a file for each change; no pages."""
_FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^\n]+?) -->\n{1,2})?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    """Path of the page from the root of the checkout."""
    line: int
    """Line of its text."""
    language: str
    note: str
    text: str
    span: tuple[int, int]
    """Where the text lies in the page."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page that users and contributors read."""
    top = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md")
    below = (page for page in (ROOT / "docs").rglob("*.md") if page.parent != CHANGES)
    return [*(ROOT / name for name in top), *sorted(below)]


def name_of(page: Path) -> str:
    """Path of a page from the root of the checkout."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    text = page.read_text("utf-8")
    return [
        Block(
            name_of(page),
            text.count("\n", 0, match.start("text")) + 1,
            match["language"],
            match["note"] or "",
            match["text"],
            match.span("text"),
        )
        for match in _FENCE.finditer(text)
    ]


def block_noted(note: str) -> Block:
    """The only block of all pages with this note."""
    (found,) = [block for page in pages() for block in blocks(page) if block.note == note]
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text("utf-8"))


def commands(block: Block) -> Iterator[str]:
    """The commands of a shell block, without comments; continued lines are joined."""
    for line in block.text.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s+)#.*$", "", line).strip()
        if command:
            yield command


def links(page: Path) -> list[str]:
    """Targets of every link of a page."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page)))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(page)):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        number = sum(1 for anchor in found if re.fullmatch(rf"{re.escape(plain)}(-\d+)?", anchor))
        found.add(f"{plain}-{number}" if number else plain)
    return found
