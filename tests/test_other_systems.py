"""Calls that only POSIX systems have are guarded, because most tests run on Linux only."""

import ast

import pytest
from test_layering import modules_of

POSIX_MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}
POSIX_CALLS = {
    "chown", "fork", "getegid", "geteuid", "getgid", "getuid", "killpg", "memfd_create", "mkfifo",
    "register_at_fork", "sched_getaffinity", "sched_setaffinity", "setsid", "sysconf",
}  # fmt: skip
GUARDS = ("hasattr(os", "sys.platform", "AttributeError")


def unguarded(source: str) -> list[str]:
    """Return the POSIX-only names in a module whose function has none of the guards.

    For code outside of functions, the statement of the module has to have the guard.
    """
    found = []
    for statement in ast.parse(source).body:
        inner = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        for part in inner:
            if any(guard in ast.unparse(part) for guard in GUARDS):
                continue
            for node in ast.walk(part):
                if isinstance(node, ast.Import):
                    found += [alias.name for alias in node.names if alias.name in POSIX_MODULES]
                elif isinstance(node, ast.ImportFrom) and node.module in POSIX_MODULES:
                    found.append(str(node.module))
                elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os":
                    found += [f"os.{node.attr}"] * (node.attr in POSIX_CALLS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("package", ["pytest_cka_memory", "cka"])
def test_calls_of_posix_systems_are_guarded(package):
    """Each is used only in a function that asks whether this system has it.

    emulated_cuda is not checked: it refuses every system but Linux on x86-64.
    """
    files = modules_of(package).values()
    found = {str(file): unguarded(file.read_text("utf-8")) for file in files}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import fcntl", ["fcntl"]),
        ("def f():\n  os.geteuid()", ["os.geteuid"]),
        ("def f():\n  if hasattr(os, 'geteuid'): os.geteuid()", []),
    ],
)
def test_unguarded_call_is_found(source, names):
    """The check of the sources can fail."""
    assert unguarded(source) == names
