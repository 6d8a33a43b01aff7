"""JUnit XML: figures are properties of a test case, and a breach is a failure or an error."""

from xml.etree import ElementTree

import pytest

FIGURES = {
    "start_bytes",
    "end_bytes",
    "peak_bytes",
    "retained_bytes",
    "peak_increase_bytes",
    "net_bytes",
    "batches",
}


@pytest.fixture
def junit(scripted, pytester):
    """Run tests with --junitxml; return the session and its test cases by name."""

    def run(source, *args):
        session = scripted(source, "--junitxml=j.xml", *args)
        tree = ElementTree.parse(pytester.path / "j.xml")
        return session, {case.get("name"): case for case in tree.iter("testcase")}

    return run


def _properties(case):
    return {p.get("name"): p.get("value") for p in case.iter("property")}


def test_figures_of_a_test_are_its_properties(junit, worker):
    """Each figure of a test is a JUnit property in bytes, under its own name."""
    _, cases = junit(
        "def test_it(cka_memory, meter): meter.free(meter.allocate(5)); meter.allocate(3)\n"
        "def test_other(): pass\n",
        *worker,
    )
    found = _properties(cases["test_it"])
    assert found["cka_memory.peak_increase_bytes"] == "5"
    assert found["cka_memory.retained_bytes"] == "3"
    assert "cka_memory.reserved_increase_bytes" not in found  # the device has no reserve
    assert _properties(cases["test_other"]) == {}


def test_properties_of_regions_are_named_by_their_labels(junit, worker):
    """A region's properties have its label, also in teardown; the test's own ones are kept."""
    _, cases = junit(
        """
        import pytest

        @pytest.fixture
        def around(cka_memory, meter):
            with cka_memory.measure("around"):
                yield
                meter.allocate(1)

        def test_it(around, cka_memory, meter, record_property):
            record_property("mine", 1)
            with cka_memory.measure("load") as region:
                for _ in range(5):
                    meter.allocate(2)
                    region.batch_done(1)
            with cka_memory.measure("a b/c"):
                pass
        """,
        *worker,
    )
    found = _properties(cases["test_it"])
    assert found["mine"] == "1"
    assert found["cka_memory.load.growth_bytes_per_batch"] == "2.0"
    assert found["cka_memory.load.batches"] == "5"
    assert found["cka_memory.a b/c.retained_bytes"] == "0"
    assert found["cka_memory.around.retained_bytes"] == "11"
    assert {name.rpartition(".")[2] for name in found} >= FIGURES


def test_reserve_is_a_property_if_the_device_has_one(scripted_reserve, pytester):
    """The reserve is a property if there is one, and is left out otherwise instead of zero."""
    scripted_reserve("def test_it(cka_memory, meter): meter.allocate(3)\n", "--junitxml=j.xml")
    (case,) = ElementTree.parse(pytester.path / "j.xml").iter("testcase")
    assert _properties(case)["cka_memory.reserved_increase_bytes"] == "3"


def test_any_label_gives_valid_xml(junit):
    """Control characters and lone surrogates are replaced because XML cannot contain them."""
    _, cases = junit(
        """
        def test_it(cka_memory):
            with cka_memory.measure("a\\x00b\\x1b<&\\"'\\ud800é"): pass
        """
    )
    names = _properties(cases["test_it"])
    assert "cka_memory.a?b?<&\"'?é.retained_bytes" in names


@pytest.mark.parametrize(
    ("body", "outcome", "status"),
    [
        ("meter.allocate(1)", "failure", 1),
        ("request.getfixturevalue('late')", "error", 1),
        ("pass", None, 0),
    ],
    ids=["breach", "breach-in-teardown", "kept"],
)
def test_breach_is_a_failure_in_the_call_and_an_error_in_teardown(
    junit, body, outcome, status, worker
):
    """A breach in the call is a failure and one in teardown an error, with a message of one line
    and the whole text.
    """
    session, cases = junit(
        f"""
        import pytest

        @pytest.fixture
        def late(cka_memory, meter):
            with cka_memory.measure("late"):
                yield
                meter.allocate(1)

        @pytest.mark.zero_retention
        def test_it(request, meter): {body}
        """,
        *worker,
    )
    found = [(kind, case) for kind in ("failure", "error") for case in cases["test_it"].iter(kind)]
    assert [kind for kind, _ in found] == ([outcome] if outcome else [])
    for _, element in found:
        where = " in 'late'" if outcome == "error" else ""
        headline = f"zero_retention broken{where}: retained 1 B, 1 B too much"
        assert element.get("message").strip('"').endswith(f"Failed: {headline}")
        assert "zero_retention broken: retained 1 byte, allowed 0 bytes" in element.text
        assert "\n" not in element.get("message")
    assert session.result.ret == status


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--cka-memory-min-regions=2"], pytest.ExitCode.TESTS_FAILED),
        (["--cka-memory-device=nothing"], pytest.ExitCode.USAGE_ERROR),
        (["-k", "no_such"], pytest.ExitCode.NO_TESTS_COLLECTED),
    ],
    ids=["gate", "usage", "empty"],
)
def test_exit_status_is_one_of_pytests_own(session, options, status):
    """Programs that read the exit status need not know this plugin: it is one of pytest's own."""
    assert session("def test_it(cka_memory): pass", *options).result.ret == status
