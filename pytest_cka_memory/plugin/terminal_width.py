"""The width of the terminal in which pytest prints."""

import shutil

import pytest


def terminal_width(config: pytest.Config) -> int:
    """Return the characters of a line; a process without a terminal takes 80 or ``COLUMNS``.

    Workers of pytest-xdist have no terminal.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return shutil.get_terminal_size().columns
    width: int = config.get_terminal_writer().fullwidth
    return width
