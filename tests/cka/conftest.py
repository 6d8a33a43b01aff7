"""Whatever multiplies features must come to the same."""

import pytest

from cka.functional import native

VECTORS = {"avx2": 8, "avx512": 16}


@pytest.fixture(params=VECTORS)
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply by the compiled kernel, with vectors of some width."""
    floats = VECTORS[request.param]
    if native._vector_floats() < floats:
        pytest.skip(f"{request.param}: not compiled, or not for this processor")
    monkeypatch.setattr(native, "_vector_floats", lambda: floats)


@pytest.fixture(params=["torch", "compiled"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Multiply by operators of torch, or by the compiled kernel."""
    if request.param == "torch":
        monkeypatch.setattr(native, "_vector_floats", lambda: 0)
    elif native._vector_floats() == 0:
        pytest.skip("cka.functional._gram was not compiled, or not for this processor")
    name: str = request.param
    return name
