"""Which tools find the twelve leaks of the gallery, and which accuse the repaired code.

    python benchmarks/leaks.py --json leaks.json [--python PYTHON] [TOOL ...]

For each leak, one session of pytest runs its test on copies of the repaired and the leaking code,
to fill caches that are not part of the comparison, and then on both again; the last two are judged.
Any failure counts, whatever its message names.

Tools other than this plugin know no regions. For them, what the test does before its region moves
to the level of the module, and what the region assigns outlives the test.
"""

import argparse
import ast
import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "docs"))

from docs_pages import blocks  # noqa: E402

GALLERY = HERE.parent / "docs" / "gallery.md"
OURS = "pytest-cka-memory"
MARKERS = {
    "limit_leaks, 100 B": 'limit_leaks("100 B")',
    "limit_leaks, 1 KB": 'limit_leaks("1 KB")',
    "limit_leaks, 10 KB": 'limit_leaks("10 KB")',
    "limit_leaks, 100 KB": 'limit_leaks("100 KB")',
    "limit_leaked_objects": "limit_leaked_objects()",
    "limit_leaked_objects, tensors": (
        "limit_leaked_objects(filter_fn=lambda found: isinstance(found, torch.Tensor))"
    ),
}
_WITHOUT_REGIONS = """
import pytest, torch

class cka_memory:
    device = "cpu"

class region:
    batches = staticmethod(iter)
    batch_done = staticmethod(lambda: None)
"""


class Leak(NamedTuple):
    """A section of the gallery."""

    name: str
    leaking: str
    repaired: str
    test: str


def gallery() -> Iterator[Leak]:
    """Yield the leaks of the gallery, in its order."""
    files = [block for block in blocks(GALLERY) if block.note.startswith("file: ")]
    for leaking, test, repaired in zip(files[::3], files[1::3], files[2::3], strict=True):
        name = leaking.note.removeprefix("file: ").removesuffix(".py")
        yield Leak(name, leaking.text, repaired.text, test.text)


def without_regions(test: str, marker: str) -> str:
    """Return the test with another marker, for a tool that knows no regions."""
    tree = ast.parse(test)
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    function.decorator_list = [ast.parse(f"pytest.mark.{marker}", mode="eval").body]
    function.args.args = []
    before: list[ast.stmt] = []
    for index, statement in enumerate(function.body):
        if isinstance(statement, ast.With):
            before, after = function.body[:index], function.body[index + 1 :]
            inside = [_without_measure(statement)] if statement.items[1:] else statement.body
            names = {
                target.id
                for part in inside
                for node in ast.walk(part)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            kept = [ast.Global(sorted(names))] if names else []
            function.body = [*kept, *inside, *after]
            break
    imports = [node for node in tree.body if node is not function]
    tree.body = [*imports, *ast.parse(_WITHOUT_REGIONS).body, *before, function]
    return ast.unparse(ast.fix_missing_locations(tree))


def _without_measure(region: ast.With) -> ast.With:
    return ast.With(region.items[1:], region.body)


def judge(leak: Leak, tool: str, python: str) -> dict[str, Any]:
    """Return which of the two tests the tool failed, and the CPU seconds of the session."""
    test = leak.test if tool == OURS else without_regions(leak.test, MARKERS[tool])
    with TemporaryDirectory() as folder:
        for kind, code in zip("abcd", (leak.repaired, leak.leaking) * 2, strict=True):
            module = f"{kind}_{leak.name}"
            Path(folder, f"{module}.py").write_text(code, "utf-8")
            imported = test.replace(f"from {leak.name} import", f"from {module} import")
            Path(folder, f"test_{kind}.py").write_text(imported, "utf-8")
        options = ["-p", "no:cacheprovider", "-p", "no:randomly", "-q", "-rA", "--color=no"]
        if tool != OURS:
            options += ["-p", "no:cka_memory"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run(
            [python, "-m", "pytest", *options],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    found = re.findall(r"^(PASSED|FAILED|MEMORY PROBLEMS) (\w+)\.py::", done.stdout, re.MULTILINE)
    outcomes = {file: outcome for outcome, file in found}
    if len(outcomes) != 4:
        raise RuntimeError(f"{tool}, {leak.name}: not every test ran\n{done.stdout}{done.stderr}")
    failed = {file for file, outcome in outcomes.items() if outcome != "PASSED"}
    return {
        "leak": leak.name,
        "found": "test_d" in failed,
        "accused": "test_c" in failed,
        "user_seconds": round(seconds, 2),
    }


def main() -> None:
    """Judge every leak with each tool, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", default=[OURS, *MARKERS])
    parser.add_argument("--python", default=sys.executable, help="interpreter with the tools")
    parser.add_argument("--json", type=Path, required=True, help="rows of other tools are kept")
    arguments = parser.parse_args()
    data = json.loads(arguments.json.read_text("utf-8")) if arguments.json.exists() else {}
    for tool in arguments.tools:
        rows = [judge(leak, tool, arguments.python) for leak in gallery()]
        found, accused = (sum(row[key] for row in rows) for key in ("found", "accused"))
        print(f"{tool}: {found} of {len(rows)} leaks found, {accused} repairs accused", flush=True)
        data[tool] = {"rows": rows, **_conditions_of(arguments.python)}
    arguments.json.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def _conditions_of(python: str) -> dict[str, object]:
    code = (
        "import json; from conditions import conditions; "
        "print(json.dumps(conditions(('torch', 'pytest', 'pytest-memray'))))"
    )
    done = subprocess.run(
        [python, "-c", code], cwd=HERE, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    main()
