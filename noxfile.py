"""One command for each check: ``nox -s lint``, ``types``, ``unit``, ``tests``, ``docs``, ``wheel``.

Each session uses the environment that is active, which has the extras ``dev`` and ``docs``
(``pip install -e ".[dev,docs]"``); ``bash .ci/run`` makes one of its own. Arguments after ``--``
are passed on, such as ``nox -s unit -- -k units``.
"""

import os

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "unit"]

UNIT = """
    baseline_changes baseline_file baselines card_uses cli decoder device_names display
    github_commands history html html_problems judging junit_properties last_levels
    limit_values markdown narrow_terminals rank_sync ranks_that_differ reading
    region_context region_record report_files report_lines schema scripted_regions
    source_code sweeps timeline tolerance trend units user_frames
"""
"""Modules of ``tests/memory`` that test functions and values, without processes of their own."""


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.run("ruff", "check", ".", *session.posargs)
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types."""
    session.run("mypy", *session.posargs)


@nox.session
def unit(session: nox.Session) -> None:
    """Run the tests of functions and values."""
    files = [f"tests/memory/test_{name}.py" for name in UNIT.split()]
    session.run("pytest", "-q", "tests/test_layering.py", *files, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests, one process for each core."""
    session.run("pytest", "-n", "auto", "--dist", "worksteal", "--slow", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Make the site and run the pages."""
    folder = os.path.join(session.create_tmp(), "site")
    session.run("python", "-m", "sphinx", "-W", "-q", "-b", "html", "docs", folder)
    session.run("pytest", "-q", "tests/docs", *session.posargs)
    session.log(f"the site is in {folder}")


@nox.session
def wheel(session: nox.Session) -> None:
    """Build, check and test what a release consists of."""
    session.run("bash", ".ci/artefacts", "dist", *(session.posargs or ["python"]))
