"""What threads share in the counter is guarded, as ThreadSanitizer checks it."""

import shutil
import subprocess
from pathlib import Path

import pytest

import pytest_cka_memory

SOURCES = Path(pytest_cka_memory.__file__).parent / "meters" / "blocks" / "csrc"
PROGRAM = Path(__file__).with_name("threads_and_regions.c")


@pytest.fixture
def compiler(tmp_path: Path) -> str:
    """Return a C compiler that can link ThreadSanitizer, whose programs run on this machine."""
    found = shutil.which("cc") or ""
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }", encoding="utf-8")
    if not SOURCES.is_dir() or not found:
        pytest.skip("requires a C compiler and the sources of the counter")
    command = [found, "-fsanitize=thread", str(empty), "-o", str(tmp_path / "empty")]
    for words in (command, [str(tmp_path / "empty")]):
        if subprocess.run(words, capture_output=True, check=False).returncode != 0:
            pytest.skip("requires a C compiler with ThreadSanitizer")
    return found


@pytest.mark.slow
def test_threads_that_allocate_while_regions_open_and_close_race_for_nothing(
    compiler: str, tmp_path: Path
) -> None:
    """ThreadSanitizer reports no unguarded access, and no block or region is left."""
    program = tmp_path / "program"
    flags = ["-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-fexceptions", f"-I{SOURCES}"]
    sources = [str(PROGRAM), *map(str, sorted(SOURCES.glob("*.c")))]
    built = subprocess.run(
        [compiler, *flags, *sources, "-o", str(program), "-lpthread", "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
