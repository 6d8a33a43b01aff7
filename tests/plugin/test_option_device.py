"""``--cka-memory-device``: a device that is not available is refused; tests are not skipped."""

import pytest
import torch

from pytest_cka_memory import DeviceError, MemoryProbe

pytest_xdist = pytest.importorskip("xdist")

MARKED = "import pytest\n@pytest.mark.zero_retention\ndef test_it(): pass\n"
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")


@pytest.mark.parametrize("source", [MARKED, "def test_it(): pass\n"], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("device", "message"),
    [
        pytest.param("cuda", "'cuda' is not available", marks=no_cuda),
        ("nonsense", "unknown device 'nonsense'; write one of auto, cpu, cuda"),
    ],
)
def test_unavailable_device_ends_the_session(session, worker, source, device, message):
    """An unavailable device ends the session, whether or not a test asks to be measured."""
    run = session(source, f"--cka-memory-device={device}", *worker, forked=bool(worker))
    run.assert_refused("--cka-memory-device: ", message)


@pytest.mark.parametrize("device", ["", "cuda:", "cuda:x", "cuda:-1", "auto:0", "CUDA", "cpu:0:1"])
def test_invalid_device_name_is_refused(session, device):
    """The error for an invalid device name quotes it and says what to write."""
    run = session(MARKED, f"--cka-memory-device={device}")
    run.assert_refused(f"unknown device {device!r}; write one of auto, cpu")


@no_cuda
def test_unavailable_device_in_the_ini_file_is_refused(session, pytester):
    """A device in the ini file is checked in the same way as one of the option."""
    pytester.makeini("[pytest]\ncka_memory_device = cuda:1\n")
    run = session(MARKED)
    run.assert_refused("device 'cuda:1' is not available", "write cpu, or auto")


def removal(given, instead):
    """Return the message for a device that was removed, without the option's name."""
    return (
        f"predict:cuda was removed, and {given!r} was given; write {instead}, which runs torch's "
        "own CUDA allocator without a GPU. It requires Linux on x86-64 and a CUDA build of torch, "
        "which 'pip install torch' installs there"
    )


@pytest.mark.parametrize("source", [MARKED, "def test_it(): pass\n"], ids=["marked", "unmarked"])
def test_predicted_device_ends_the_session_and_names_the_emulated_one(session, worker, source):
    """The error for a predicted device names the emulated one of the same card, and its needs."""
    device = "predict:cuda:a100-40gb"
    run = session(source, f"--cka-memory-device={device}", *worker, forked=bool(worker))
    assert run.result.ret == pytest.ExitCode.USAGE_ERROR == 4
    message = removal(device, "emulate:cuda:a100-40gb")
    run.assert_refused(f"ERROR: --cka-memory-device: {message}\n")


def test_predicted_device_in_the_ini_file_is_refused(session, pytester):
    """The error for a predicted device in the ini file names the key."""
    pytester.makeini("[pytest]\ncka_memory_device = predict:cuda\n")
    run = session(MARKED)
    run.assert_refused("cka_memory_device", removal("predict:cuda", "emulate:cuda"))


@pytest.mark.parametrize(
    ("device", "instead"),
    [
        ("predict:cuda", "emulate:cuda"),
        ("predict:cuda:h100", "emulate:cuda:h100"),
        ("predict:cuda:b9000", "emulate:cuda"),
        ("predict:cuda0", "emulate:cuda"),
        ("predict:cpu", "emulate:cuda"),
        ("predict:a100", "emulate:cuda"),
        ("predict", "emulate:cuda"),
    ],
)
def test_probe_on_a_predicted_device_is_an_error(device, instead):
    """A probe's error for a predicted device repeats its card if it can be emulated."""
    with pytest.raises(DeviceError) as error:
        MemoryProbe(device=device)
    assert str(error.value) == removal(device, instead)


@pytest.mark.parametrize("device", ["cuda", "nonsense", "predict:cuda"])
def test_collect_only_does_not_require_the_device(session, device, worker):
    """With --collect-only, tests are listed on a machine without their device."""
    run = session(
        MARKED, f"--cka-memory-device={device}", "--collect-only", *worker, forked=bool(worker)
    )
    assert run.result.ret == pytest.ExitCode.OK
    assert "INTERNALERROR" not in run.text
    assert run.report is None


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_available_device_is_used(session, device):
    """An available device is used, and the report names it."""
    source = """
        import pytest
        import torch
        @pytest.mark.zero_retention
        def test_it(cka_memory): torch.ones(1000, device=cka_memory.device)
        """
    run = session(source, f"--cka-memory-device={device}")
    run.assert_outcomes(passed=1)
    assert run.report["session"]["device"].startswith("cpu" if device == "cpu" else "")


def test_fixture_has_the_device(session):
    """``cka_memory.device`` is the torch.device to move models to."""
    run = session(
        """
        import torch
        def test_it(cka_memory): assert cka_memory.device == torch.device("cpu")
        """,
        "--cka-memory-device=cpu",
    )
    run.assert_outcomes(passed=1)


def test_conftest_may_provide_a_device(scripted, worker):
    """A device that the plugin does not know is accepted if a hook returns a meter for it."""
    run = scripted(MARKED, "--cka-memory-device=abacus", *worker, forked=bool(worker))
    run.assert_outcomes(passed=1)
    assert run.report["session"]["meter"] == "scripted figures"


@pytest.mark.gpu
def test_named_accelerator_is_measured(session):
    """If an accelerator is named, the figures are those of its own allocator."""
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
    run.assert_outcomes(passed=1)
    assert run.region["retained_bytes"] == 2**20
    assert run.report["session"]["device"].startswith(kind)


def test_device_that_fails_at_the_first_test_is_an_error_of_each_test(session, pytester, worker):
    """A device that fails when the first test needs it is an error of each test."""
    pytester.makeconftest(
        """
        from pytest_cka_memory import DeviceError

        def pytest_cka_memory_meter(device):
            raise DeviceError("the abacus is lost")
        """
    )
    run = session(MARKED + "\ndef test_unmarked(): pass\n", *worker, forked=bool(worker))
    run.assert_outcomes(passed=1, errors=1)
    run.result.stdout.fnmatch_lines(["test_it.py::test_it: --cka-memory-device: the abacus is*"])
    assert run.regions == []
