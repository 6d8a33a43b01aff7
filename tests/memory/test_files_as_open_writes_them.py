"""A report file gets the mode, the names and the refusals that ``open(path, "w")`` gives."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_cka_memory import ReportError
from pytest_cka_memory.reports import files

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="requires a POSIX system")

NOBODY = 65534


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The umask of the process during the test."""
    mask: int = request.param
    before = os.umask(mask)
    yield mask
    os.umask(before)


def test_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    """A new report has the mode that the umask leaves, so that private files stay private."""
    path = tmp_path / "report.json"
    files.write_whole(path, "new")
    assert mode_of(path) == 0o666 & ~umask


@pytest.mark.parametrize("mode", [0o200, 0o600, 0o640, 0o666], ids=oct)
def test_existing_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    """A report that is written again keeps its mode, so the same users can read it."""
    path = tmp_path / "report.json"
    path.write_text("old")
    path.chmod(mode)
    files.check_writable(path)
    files.write_whole(path, "new")
    assert mode_of(path) == mode
    path.chmod(0o600)
    assert path.read_text() == "new"


def test_every_name_of_a_file_shows_the_new_text(tmp_path: Path) -> None:
    """A report with two names (hard links) is still one file after it was written."""
    path, other = tmp_path / "report.json", tmp_path / "other.json"
    path.write_text("old, and much longer than the new one")
    other.hardlink_to(path)
    files.check_writable(path)
    files.write_whole(path, "new")
    assert (path.read_text(), other.read_text()) == ("new", "new")
    assert path.samefile(other)


@pytest.mark.parametrize("size", [250, 255])
def test_name_may_be_as_long_as_the_system_allows(tmp_path: Path, size: int) -> None:
    """A name may have the system's longest length, as the temporary file's is shorter."""
    path = tmp_path / ("ü" * 5 + "n" * (size - 10))
    files.check_writable(path)
    files.write_whole(path, "first")
    files.write_whole(path, "second")
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("use", [files.check_writable, lambda path: files.write_whole(path, "x")])
def test_longer_name_is_refused(tmp_path: Path, use: Callable[[Path], None]) -> None:
    """A name that is longer than allowed is refused with the system's reason."""
    with pytest.raises(ReportError, match=r"cannot write .*: File name too long"):
        use(tmp_path / ("n" * 256))


def test_link_to_a_missing_file_creates_that_file(tmp_path: Path) -> None:
    """Writing to a link whose file is missing creates that file, and the link stays a link."""
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "target.json")
    files.check_writable(link)
    assert not link.exists()
    files.write_whole(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "target.json").read_text() == "new"


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    """Links that lead in a circle are refused with the system's reason."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ReportError, match=r"cannot write .*: Too many levels of symbolic links"):
        files.check_writable(tmp_path / "a")


def as_nobody(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run code as a user who may not write everywhere, with the module and the paths."""
    become = f"import os\nif os.geteuid() == 0: os.setegid({NOBODY}); os.seteuid({NOBODY})\n"
    prepare = "import sys\nfrom pathlib import Path\nfrom pytest_cka_memory.reports import files\n"
    names = "paths = [Path(text) for text in sys.argv[1:]]\n"
    return subprocess.run(
        [sys.executable, "-c", prepare + names + become + code, *paths],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder in which every user may create files; its parents let every user pass."""
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent.stat().st_uid == os.geteuid() and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o711)
    tmp_path.chmod(0o777)
    return tmp_path


@pytest.mark.parametrize(
    "call", ["files.check_writable(paths[0])", "files.write_whole(paths[0], 'new')"]
)
def test_read_only_file_is_refused(open_folder: Path, call: str) -> None:
    """A read-only file is protected by its owner, so it is not replaced even if the folder allows
    it.
    """
    path = open_folder / "report.json"
    path.write_text("old")
    path.chmod(0o444)
    done = as_nobody(call, path)
    assert "report.json: Permission denied" in done.stderr
    assert path.read_text() == "old"
    assert list(open_folder.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_file_of_another_user_keeps_its_owner(open_folder: Path) -> None:
    """A file of another user, who lets others write it, keeps its owner."""
    path = open_folder / "report.json"
    path.write_text("old")
    path.chmod(0o666)
    done = as_nobody("files.check_writable(paths[0]); files.write_whole(paths[0], 'new')", path)
    assert done.returncode == 0, done.stderr
    assert (path.read_text(), path.stat().st_uid) == ("new", 0)
    os.chown(path, NOBODY, NOBODY)
    files.write_whole(path, "newer")
    assert (path.read_text(), path.stat().st_uid) == ("newer", NOBODY)


@pytest.mark.skipif(os.geteuid() != 0, reason="root creates the folder that others cannot write")
def test_file_in_a_folder_that_is_read_only_is_written(open_folder: Path) -> None:
    """In a read-only folder no temporary file can be created; the file itself is written."""
    folder = open_folder / "inner"
    folder.mkdir(mode=0o755)
    path = folder / "report.json"
    path.write_text("old")
    os.chown(path, NOBODY, NOBODY)
    done = as_nobody("files.check_writable(paths[0]); files.write_whole(paths[0], 'new')", path)
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "new"


REPORTED = """
import sys
from pathlib import Path
from pytest_cka_memory.reports import files
print("before")
sys.stdout.flush()
files.check_writable(Path(sys.argv[1]))
files.write_whole(Path(sys.argv[1]), "report")
"""


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="requires /dev/stdout")
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "out.txt"])
def test_file_of_the_process_own_output_is_refused(tmp_path: Path, name: str) -> None:
    """A report is not written to the file of the process's output, which it would overwrite."""
    with (tmp_path / "out.txt").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", REPORTED, name],
            cwd=tmp_path, stdout=out, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert f"cannot write {name}: this process prints its own output to that file" in done.stderr
    assert (tmp_path / "out.txt").read_text() == "before\n"


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="requires /dev/stdout")
def test_standard_output_that_is_a_pipe_is_written(tmp_path: Path) -> None:
    """If standard output is a pipe, its reader gets the report and what was printed."""
    done = subprocess.run(
        [sys.executable, "-c", REPORTED, "/dev/stdout"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("before\nreport", "")


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="requires /dev/fd")
def test_another_open_file_is_written_in_place(tmp_path: Path) -> None:
    """An open file, as ``/dev/fd/3`` in a shell, is written in place for its reader."""
    with (tmp_path / "report.json").open("w+") as file:
        path = Path(f"/dev/fd/{file.fileno()}")
        files.check_writable(path)
        files.write_whole(path, json.dumps([1]))
        assert json.load((tmp_path / "report.json").open()) == [1]


@pytest.mark.parametrize("same", [True, False])
def test_two_paths_of_one_file_are_recognized(tmp_path: Path, same: bool) -> None:
    """Two paths are one file by their names if it does not exist
    yet, and by the file if it does.
    """
    folder = tmp_path / "inner"
    folder.mkdir()
    path, other = folder / "r.json", tmp_path / "link" / ("r.json" if same else "s.json")
    (tmp_path / "link").symlink_to(folder)
    assert files.same_file(path, other) is same
    path.write_text("")
    assert files.same_file(path, other) is same
    if same:
        (folder / "t.json").hardlink_to(path)
        assert files.same_file(folder / "t.json", other)


def test_device_is_not_a_file_that_one_report_overwrites(tmp_path: Path) -> None:
    """Several reports may be written to one device, because nothing is overwritten."""
    assert not files.same_file(Path(os.devnull), Path(os.devnull))
