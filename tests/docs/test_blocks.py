"""No block of a page escapes the tests: each is run, compared, used by what is run, or excused.

The rules here are about the notes above the blocks; ``test_pages.py`` does what the notes say.
"""

import re
import shlex
import sys
from pathlib import Path, PurePosixPath

import pytest
from docs_pages import ROOT, Block, blocks, commands, name_of, pages

sys.path.append(str(ROOT / "benchmarks"))
_VERSION = r"(, torch \d+\.\d+)?"
NOTES = {  # of a language: what the note of a block may be; "" is no note
    "sh": r"|fails|not run: \S.{5,}",
    "python": r"|file: \S+\.py|checked by: \S+\.py",
    "text": rf"file: \S+|output(, last line)?{_VERSION}|output: .+?{_VERSION}"
    r"|drawn: .+|checked by: \S+\.py",
    "diff": r"checked by: \S+\.py",
    "yaml": r"file: \S+\.yml|checked by: \S+\.py",
    "toml": r"file: \S+\.toml",
    "ini": r"file: \S+\.ini",
    "json": r"file: \S+\.json",
}
ALL = pytest.mark.parametrize("page", pages(), ids=name_of)


NEVER_RUN = {"docs/how-to/several-gpus.md: train.py"}
"""Files that no command uses: a model of eight billion parameters on eight devices."""


def faults(found: list[Block]) -> list[str]:
    """Return what is wrong with the notes of a page's blocks."""
    wrong = []
    for number, block in enumerate(found):
        kind, _, argument = block.note.partition(": ")
        if not re.fullmatch(NOTES.get(block.language, r"(?!)"), block.note):
            wrong.append(f"{block}: a {block.language} block cannot have the note {block.note!r}")
        elif kind == "checked by" and not _reads(argument, block.page):
            wrong.append(f"{block}: {argument} does not read {block.page}")
        elif kind == "drawn" and argument not in _drawn_on(block.page):
            wrong.append(f"{block}: draw_tables.py draws no {argument!r} on this page")
        elif kind == "file" and f"{block.page}: {argument}" in NEVER_RUN:
            compile(block.text, argument, "exec")
        elif kind == "file" and not _is_used(argument, block, found[number + 1 :]):
            wrong.append(f"{block}: {argument} is written, and nothing that is run uses it")
        elif kind == "fails" and not list(commands(block)):
            wrong.append(f"{block}: there is no command")
        elif kind.startswith("output") and not _runs_before(found[:number]):
            wrong.append(f"{block}: nothing that printed this was run before")
    return wrong


def _reads(test: str, page: str) -> bool:
    """Whether a test, or a module beside it that it imports, names the page."""
    file = ROOT / test
    if not file.is_file():
        return False
    text = file.read_text("utf-8")
    texts = [text, *(m.read_text("utf-8") for m in file.parent.glob("*.py") if _imports(text, m))]
    names = PurePosixPath(page).name, f'"{PurePosixPath(page).stem}"', f"checked by: {test}"
    return any(name in each for name in names for each in texts)


def _imports(text: str, module: Path) -> bool:
    is_test = module.stem.startswith(("test_", "docs_"))
    return not is_test and bool(re.search(rf"^(import|from) {module.stem}\b", text, re.MULTILINE))


def _drawn_on(page: str) -> set[str]:
    from draw_tables import TABLES

    return set(TABLES.get(ROOT / page, {}))


def _is_run(block: Block) -> bool:
    return (block.language, block.note) in (("sh", ""), ("sh", "fails"), ("python", ""))


def _runs_before(earlier: list[Block]) -> bool:
    return any(_is_run(block) for block in earlier)


def _is_used(name: str, block: Block, later: list[Block]) -> bool:
    """Whether a command uses a file before the page replaces it, or a test asks for the file."""
    for each in later:
        if each.note == block.note:
            break
        if each.language == "sh" and _is_run(each) and any(_uses(c, name) for c in commands(each)):
            return True
    stem = PurePosixPath(block.page).stem
    tests = [test.read_text("utf-8") for test in Path(__file__).parent.glob("test_*.py")]
    return any(f'"{name}"' in text and f'"{stem}.md"' in text for text in tests)


def _uses(command: str, name: str) -> bool:
    """Whether a command runs a file: by its name, its folder, or with everything else.

    What is no test may be imported by any test or script, or read by any command.
    """
    program, *words = shlex.split(command)
    if program in ("mkdir", "cd"):
        return False
    file = PurePosixPath(name)
    if not file.name.startswith("test_"):
        return True
    given = {PurePosixPath(word.partition("::")[0]) for word in words if not word.startswith("-")}
    if given & {file, *file.parents} - {PurePosixPath()}:
        return True
    is_pytest = program == "pytest" or (program == "python" and words[:2] == ["-m", "pytest"])
    return is_pytest and given <= {PurePosixPath("pytest")}


@ALL
@pytest.mark.sources
def test_notes_let_no_block_escape(page: Path) -> None:
    """Each block is run or compared, a file is used by what is run, an excuse has a reason."""
    assert faults(blocks(page)) == []


@ALL
@pytest.mark.sources
def test_page_has_no_code_outside_of_fenced_blocks(page: Path) -> None:
    """Code in HTML or between tildes would be shown to readers, and found by no test."""
    assert re.findall(r"^\s*~~~|<(?:pre|code)\b", page.read_text("utf-8"), re.MULTILINE) == []


@pytest.mark.sources
def test_site_has_no_code_of_its_own() -> None:
    """Pages in reStructuredText, of which no test runs anything, show no code but whole files."""
    for page in (ROOT / "docs").rglob("*.rst"):
        text = page.read_text("utf-8")
        assert not re.search(r"code-block|doctest|^[^.\s].*:: *$|>>> ", text, re.MULTILINE)


PAGE = """\
<!-- file: test_it.py -->
```python
def test_it(): pass
```

```sh
pytest
```

<!-- output -->
```text
```
"""


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("```sh", "<!-- not run -->\n```sh", "cannot have the note 'not run'"),
        ("```sh", "<!-- not run: -->\n```sh", "cannot have the note"),
        ("```sh", "<!-- not run: needs a GPU -->\n```sh", "nothing that is run uses it"),
        ("```sh", "<!-- fail -->\n```sh", "cannot have the note 'fail'"),
        ("```sh", "<!-- checked by: tests/conftest.py -->\n```sh", "cannot have the note"),
        ("pytest\n", "pytest test_other.py\n", "nothing that is run uses it"),
        ("pytest\n", "mkdir tests\n", "nothing that is run uses it"),
        ("<!-- output -->", "", "cannot have the note ''"),
        ("<!-- output -->", "<!-- checked by: nothing -->", "cannot have the note"),
        ("<!-- output -->", "<!-- checked by: tests/no.py -->", "does not read"),
        ("<!-- output -->", "<!-- checked by: tests/docs/test_links.py -->", "does not read"),
        ("<!-- output -->", "<!-- drawn: nothing -->", "draws no 'nothing'"),
        ("```python", "```ruby", "cannot have the note"),
        ("def test_it(): pass\n```\n", "```\n<!-- file: test_b.py -->\n```python\n```\n", ""),
    ],
)
def test_block_that_would_escape_is_found(tmp_path: Path, old: str, new: str, fault: str) -> None:
    """Each way in which a block could avoid being tested is a fault; the page itself has none."""
    page = ROOT / "docs" / "made_up.md"
    file = tmp_path / "made_up.md"
    assert PAGE.count(old) == 1
    for text, expected in ((PAGE, ""), (PAGE.replace(old, new), fault)):
        file.write_text(text, "utf-8")
        wrong = faults(_blocks_as(file, page))
        assert (expected in " ".join(wrong)) if expected else wrong == []


def _blocks_as(file: Path, page: Path) -> list[Block]:
    import docs_pages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(docs_pages, "name_of", lambda _: page.relative_to(ROOT).as_posix())
        return blocks(file)
