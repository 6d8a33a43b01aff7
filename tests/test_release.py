"""What ``.ci/release`` does to a copy of the project, and what it refuses."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.sources
OWN = ("pyproject.toml", "CHANGELOG.md", "CITATION.cff", ".ci/release")


@pytest.fixture
def project(tmp_path):
    """Copy what the script reads and writes."""
    for name in OWN:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs/project/changes", tmp_path / "docs/project/changes")
    version = Path("pytest_cka_memory/_version.py")
    (tmp_path / version.parent).mkdir()
    shutil.copy(ROOT / version, tmp_path / version)
    return tmp_path


def release(project, *arguments):
    """Run the script of the copy, with the Python that runs the test."""
    command = ["bash", str(project / ".ci/release"), *arguments]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_prepared_release_can_be_released_if_its_owner_is_known(project):
    """After ``prepare``, version, citation and changelog agree; only the placeholder is left."""
    pytest.importorskip("towncrier", reason="needs towncrier, which the extra dev installs")
    (project / "docs/project/changes/example.added.md").write_text("**Example.** Text.\n")
    log = project / "CHANGELOG.md"
    head, _, releases = log.read_text("utf-8").partition("## ")
    unreleased = "By hand.\n\n### Breaking: what to write instead\n\n- More.\n"
    log.write_text(f"{head}## Unreleased\n\n{unreleased}\n## {releases}", "utf-8")
    done = release(project, "prepare", "7.8.9")
    assert done.returncode == 0, done.stderr
    assert '"7.8.9"' in (project / "pytest_cka_memory/_version.py").read_text("utf-8")
    after = (project / "CHANGELOG.md").read_text("utf-8")
    title, _, rest = after.removeprefix(head).partition("\n\n")
    assert re.fullmatch(r"## 7\.8\.9 \(\d{4}-\d\d-\d\d\)", title)
    # Breaking changes stand in what was written by hand, so they come first.
    assert rest.startswith(f"{unreleased.rstrip()}\n\n### Added\n\n- **")
    assert "- **Example.** Text." in rest
    assert "\n\n\n" not in after
    assert after.endswith(f"\n\n## {releases}")  # what was released before, as it was
    assert after.count("\n## ") == 1 + releases.count("\n## ") + 1

    refused = release(project, "check", "v7.8.9")
    assert (refused.returncode, "placeholder OWNER" in refused.stderr) == (1, True)
    file = project / "pyproject.toml"
    file.write_text(file.read_text("utf-8").replace("/OWNER/", "/someone/"), "utf-8")
    assert release(project, "check", "v7.8.9").stdout == "v7.8.9 can be released\n"


def test_release_without_files_of_changes_has_what_was_unreleased(project):
    """What stands below "Unreleased" becomes the section of the version, and keeps its text."""
    for file in (project / "docs/project/changes").glob("*.md"):
        file.unlink()
    log = project / "CHANGELOG.md"
    log.write_text("# Changelog\n\n## Unreleased\n\nText.\n", "utf-8")
    done = release(project, "prepare", "7.8.9")
    assert done.returncode == 0, done.stderr
    after = log.read_text("utf-8")
    assert re.fullmatch(r"# Changelog\n\n## 7\.8\.9 \(\d{4}-\d\d-\d\d\)\n\nText\.\n", after)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["check", "v99.0.0"], 1, "_version.py has another version"),
        (["check", "v1.0"], 2, "v1.0 is not a version such as 0.2.0"),
        (["prepare", "1.0.0-rc1"], 2, "is not a version"),
        (["publish", "1.0.0"], 2, "usage: "),
        (["check"], 2, "usage: "),
    ],
    ids=str,
)
def test_wrong_arguments_and_versions_are_refused(project, arguments, status, message):
    """The script says what is wrong, and changes no file."""
    before = {name: (project / name).read_bytes() for name in OWN}
    done = release(project, *arguments)
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr
    assert {name: (project / name).read_bytes() for name in OWN} == before
