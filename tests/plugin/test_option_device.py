"""``--cka-memory-device``: a device that is not there is refused, never skipped."""

import pytest
import torch

pytest_xdist = pytest.importorskip("xdist")

MARKED = "import pytest\n@pytest.mark.zero_retention\ndef test_it(): pass\n"
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "xdist"])
@pytest.mark.parametrize("source", [MARKED, "def test_it(): pass\n"], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("device", "message"),
    [
        pytest.param("cuda", "'cuda' is not there", marks=no_cuda),
        ("nonsense", "unknown device 'nonsense'; write one of auto, cpu, cuda"),
    ],
)
def test_a_device_that_is_not_there_ends_the_session(session, workers, source, device, message):
    """Whether or not a test asks to be measured, serially and in parallel."""
    run = session(source, f"--cka-memory-device={device}", *workers, subprocess=True)
    run.refused("--cka-memory-device: ", message)


@pytest.mark.parametrize("device", ["", "cuda:", "cuda:x", "cuda:-1", "auto:0", "CUDA", "cpu:0:1"])
def test_a_text_that_is_no_device_is_refused(session, device):
    """By its own name, and with what to write instead."""
    run = session(MARKED, f"--cka-memory-device={device}")
    run.refused(f"unknown device {device!r}; write one of auto, cpu")


@no_cuda
def test_the_ini_file_may_name_a_device_too(session, pytester):
    """A missing one is refused likewise."""
    pytester.makeini("[pytest]\ncka_memory_device = cuda:1\n")
    session(MARKED).refused("device 'cuda:1' is not there", "write cpu, or auto")


@pytest.mark.parametrize("device", ["cuda", "nonsense"])
@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "xdist"])
def test_collecting_only_needs_no_device(session, device, workers):
    """Tests can be listed on a machine that cannot run them."""
    run = session(MARKED, f"--cka-memory-device={device}", "--collect-only", *workers)
    assert run.result.ret == pytest.ExitCode.OK
    assert "INTERNALERROR" not in run.text
    assert run.report is None


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_device_that_is_there_is_taken(session, device):
    """And the report says which it was."""
    run = session(MARKED, f"--cka-memory-device={device}")
    run.outcomes(passed=1)
    assert run.report["session"]["device"].startswith("cpu" if device == "cpu" else "")


def test_the_fixture_says_the_device(session):
    """``cka_memory.device`` is a torch.device to put models on."""
    run = session(
        """
        import torch
        def test_it(cka_memory): assert cka_memory.device == torch.device("cpu")
        """,
        "--cka-memory-device=cpu",
    )
    run.outcomes(passed=1)


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "xdist"])
def test_a_conftest_may_know_other_devices(scripted, workers):
    """A device the plugin does not know is no error where a hook answers for it."""
    run = scripted(MARKED, "--cka-memory-device=abacus", *workers, subprocess=bool(workers))
    run.outcomes(passed=1)
    assert run.report["session"]["meter"] == "scripted figures"


@pytest.mark.gpu
def test_a_named_accelerator_is_measured(session):
    """The accelerator's own allocator counts, in its own unit of blocks."""
    kind = torch.accelerator.current_accelerator().type
    run = session(
        """
        import torch
        def test_it(cka_memory):
            with cka_memory.measure():
                kept = torch.ones(2**20, dtype=torch.uint8, device=cka_memory.device)
        """,
        f"--cka-memory-device={kind}",
    )
    run.outcomes(passed=1)
    assert run.region["retained_bytes"] == 2**20
    assert run.report["session"]["device"].startswith(kind)


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "xdist"])
def test_a_device_found_missing_late_is_an_error_of_each_test(session, pytester, workers):
    """A hook that finds no device when the first test asks for it: no test passes unmeasured."""
    pytester.makeconftest(
        """
        from pytest_cka_memory import DeviceError

        def pytest_cka_memory_meter(device):
            raise DeviceError("the abacus is lost")
        """
    )
    run = session(MARKED + "\ndef test_unmarked(): pass\n", *workers, subprocess=bool(workers))
    run.outcomes(passed=1, errors=1)
    run.result.stdout.fnmatch_lines(["test_it.py::test_it: --cka-memory-device: the abacus is*"])
    assert run.regions == []
