"""If very many storages are explained, one line says what takes so long."""

import pytest

from pytest_cka_memory.holders import survivors
from pytest_cka_memory.holders.survivors import Progress


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock that the line waits for."""
    found = Clock()
    monkeypatch.setattr(survivors, "time", found)
    return found


def test_one_line_is_written_after_two_seconds(clock: Clock) -> None:
    """The line comes when 2 s have passed, once, with the number of tensors."""
    lines: list[str] = []
    found = Progress(1_000_000, lines.append)
    for clock.now in (100.0, 101.9):
        found.step()
    assert lines == []
    for clock.now in (102.1, 103.0, 200.0):
        found.step()
    (line,) = lines
    assert line.startswith("cka-memory: finding what holds 1,000,000 tensors")


def test_few_storages_are_explained_without_a_line(clock: Clock) -> None:
    """Up to 100,000 storages no line is written, however long it takes."""
    lines: list[str] = []
    found = Progress(100_000, lines.append)
    clock.now = 1000.0
    found.step()
    assert lines == []


def test_a_line_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Reports that tools read from standard output stay as they are."""
    survivors.to_stderr("a line")
    assert capsys.readouterr() == ("", "a line\n")
