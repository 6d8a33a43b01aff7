"""For every test: the pytester fixture, and the marker of tests that need an accelerator."""

import pytest

pytest_plugins = ["pytester"]


_BESIDE = ("asyncio", "cov", "randomly", "repeat")


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Inner sessions without the plugins that are installed to be tested beside: -p brings one."""
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p no:{name}" for name in _BESIDE))
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)  # the job's own summary is none of theirs
    return pytester


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator where torch finds none, and say why."""
    needing = [item for item in items if item.get_closest_marker("gpu") is not None]
    if needing and not _has_accelerator():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; torch finds none here"))


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
