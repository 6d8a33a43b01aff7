"""The rewritten tests of the page fail on the mistakes that the originals were written to find."""

from pathlib import Path

import pytest
from docs_pages import ROOT, blocks
from forked_processes import run

PAGE = blocks(ROOT / "docs" / "how-to" / "port.md")
FILES = {
    block.note.removeprefix("file: "): block.text
    for block in PAGE
    if block.note.startswith("file: ")
}
ON_A_CARD = [pytest.mark.emulates]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "correct", "mistaken"),
    [
        pytest.param(
            "tests/test_freed.py::test_release_memory",
            "return [None for _ in objects]",
            "KEPT.extend(objects); return [None for _ in objects]\n\n\nKEPT = []",
            id="1",
        ),
        pytest.param(
            "tests/test_freed.py::test_schedule_leaves_nothing_to_the_collector",
            "self.model, self.outputs = model, []",
            "self.model, self.outputs, self.again = model, [], self.step",
            id="2",
        ),
        pytest.param(
            "tests/test_freed.py::test_training_batch_is_gone_during_validation",
            "model(load()).sum().backward()",
            "model.kept = load(); model(model.kept).sum().backward()",
            id="3",
        ),
        pytest.param(
            "tests/test_peaks.py::test_peak_of_training",
            "torch.ones(64, 256,",
            "torch.ones(6400, 256,",
            id="4",
        ),
        pytest.param(
            "tests/test_peaks.py::test_sequential_offloading",
            'each.to("cpu")',
            "pass",
            id="5",
            marks=ON_A_CARD,
        ),
        pytest.param(
            "tests/test_peaks.py::test_intermediate_is_not_materialised",
            ".split(256)",
            ".split(4096)",
            id="6",
        ),
        pytest.param(
            "tests/test_peaks.py::test_checkpointing_saves_activations",
            "checkpoint(each, values, use_reentrant=False)",
            "each(values)",
            id="7",
        ),
        pytest.param(
            "tests/test_smaller.py::test_footprint_of_8_bits",
            "(load, torch.int8)",
            "(load, torch.float16)",
            id="9",
        ),
        pytest.param(
            "tests/test_offloading.py::test_offload_states",
            'parameter.data = parameter.data.to("cpu")',
            "pass",
            id="10",
            marks=ON_A_CARD,
        ),
        pytest.param(
            "tests/test_offloading.py::test_sleep_frees_the_card", "cache.clear()", "pass", id="11"
        ),
    ],
)
@pytest.mark.usefixtures("session")
def test_rewritten_test_finds_the_mistake(
    test: str, correct: str, mistaken: str, request: pytest.FixtureRequest
) -> None:
    """A test with the mistake fails; ``test_pages.py`` runs all of them without."""
    name = test.partition("::")[0]
    assert FILES[name].count(correct) == 1
    Path("tests").mkdir()
    Path(name).write_text(FILES[name].replace(correct, mistaken), "utf-8")
    on_a_card = request.node.get_closest_marker("emulates") is not None
    device = "--cka-memory-device=emulate:cuda" if on_a_card else "--cka-memory-device=cpu"
    done = run(["pytest", device, test], merged=True)
    assert (done.returncode, "1 failed" in done.stdout) == (1, True), done.stdout
