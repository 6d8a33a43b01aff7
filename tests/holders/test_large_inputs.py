"""Objects that are large, many or nested deeply are searched, too."""

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from planted import KEEP, cleaned_up
from searched import held_by_cpp, path_to

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.holders import Root
from pytest_cka_memory.holders.search import search


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield


class TestLargeInputs:
    def test_ten_thousand_levels_of_nesting_are_searched(self) -> None:
        """A path through ten thousand levels of nesting is found,
        and written without its middle.
        """

        def nested(x: Any) -> Any:
            for _ in range(10_000):
                x = [x]
            return x

        path = path_to(nested)
        assert path.startswith("planted.KEEP[0][0]")
        assert " … " in path
        assert len(path) < 300

    def test_a_huge_container_is_searched(self) -> None:
        """The path to an element of a huge container has its index."""
        path = path_to(lambda x: [*range(300_000), {0: x}])
        assert path == "planted.KEEP[0][300000][0]"

    def test_an_array_among_many_dicts_of_numbers_is_searched(self) -> None:
        """What dicts and tuples of numbers hold is not remembered, but that one of them has an
        array, which the collector does not track either, is.
        """
        plain: list[Any] = [{"number": number} for number in range(1000)]
        path = path_to(lambda x: [*plain, {"array": (x.numpy(),)}, *plain])
        assert path.startswith("planted.KEEP[0][1000]['array'][0]")

    def test_dicts_of_numbers_are_not_remembered(self) -> None:
        """A search looks at dicts of numbers and strings together, and enters what can lead on."""
        plain = [{"number": number} for number in range(1000)]
        nested = [{"number": {"number": number}} for number in range(1000)]
        names = {"plain": plain, "nested": nested}
        found = search(lambda _: None, {1}, [Root("", "", names)], [])
        remembered = [sum(it in found.walk for it in each) for each in (plain, nested)]
        assert remembered == [sum(map(gc.is_tracked, plain)), 1000]

    def test_a_dict_that_changes_during_the_search_is_searched(self) -> None:
        """A dict is searched while another thread adds and removes keys all the time."""
        KEEP.append({})
        end = threading.Event()

        def write() -> None:
            while not end.is_set():
                for number in range(1000):
                    KEEP[0][number] = [number]
                for number in range(1000):
                    del KEEP[0][number]

        thread = threading.Thread(target=write)
        with MemoryProbe("cpu").measure() as region:
            KEEP[0]["x"] = torch.ones(250)
        thread.start()
        try:
            assert region.retained[0].held_by == "planted.KEEP[0]['x']"
        finally:
            end.set()
            thread.join()

    @pytest.mark.slow
    @pytest.mark.native
    def test_five_hundred_thousand_objects_are_searched(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A search of 500,000 objects completes; its time is printed and not checked."""
        KEEP.append([[number] for number in range(500_000)])
        with MemoryProbe("cpu").measure() as region:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.add_done_callback(held_by_cpp(torch.ones(250)))  # so everything is searched
        start = time.perf_counter()
        assert str(region.retained[0].held_by).startswith("a function that C code will call")
        seconds = time.perf_counter() - start
        assert not future.done()
        with capsys.disabled():
            print(f"\nsearched {len(gc.get_objects()):,} live objects in {seconds:.2f} s")
