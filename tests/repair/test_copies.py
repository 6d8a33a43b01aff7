"""The folder in which a patched program runs."""

from pathlib import Path

from pytest_cka_memory.repair.programs import patched_copy


def test_code_is_copied_and_data_are_linked(tmp_path: Path) -> None:
    """What imports could resolve is copied; data are read where they are, hidden folders not."""
    root, made = tmp_path / "root", tmp_path / "made"
    for name in ("train.py", "pytest.ini", "lib/net.py", "lib/table.npy", "data/a/1.bin", ".git/x"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name, encoding="utf-8")
    made.mkdir()
    patched_copy(root, made, {str(root / "lib/net.py"): "patched"})
    assert {path.name for path in made.iterdir()} == {"train.py", "pytest.ini", "lib", "data"}
    assert (made / "lib/net.py").read_text("utf-8") == "patched"
    assert (root / "lib/net.py").read_text("utf-8") == "lib/net.py"
    assert (made / "data/a/1.bin").read_text("utf-8") == "data/a/1.bin"
    links = sorted(path.name for path in made.rglob("*") if path.is_symlink())
    assert links == ["data", "table.npy"]
