"""NCCL's log on emulated devices."""

import re

import pytest

LOGGED = """
dist.all_reduce(torch.ones(4, device="cuda"), dist.ReduceOp.AVG)
dist.broadcast(torch.ones(2, device="cuda", dtype=torch.float64), 1)
"""


@pytest.mark.parametrize(("areas", "is_written"), [("COLL", True), ("^COLL", False), ("", False)])
def test_log_of_nccl_names_every_call(nccl, tmp_path, areas, is_written):
    """The log has the call, its count, type, reduction and root in NCCL's own form."""
    log = str(tmp_path / "log-%p")
    runs = nccl(LOGGED, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS=areas, NCCL_DEBUG_FILE=log)
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    written = [file.read_text("utf-8") for file in sorted(tmp_path.glob("log-*"))]
    assert sum("AllReduce" in text for text in written) == 2 * is_written
    for text in written if is_written else ():
        reduced, broadcast = text.splitlines()
        assert re.search(
            r"NCCL INFO AllReduce: opCount 0 sendbuff 0x\w+ recvbuff 0x\w+ count 4 datatype 7 op 4",
            reduced,
        )
        assert re.search(
            r"Broadcast: opCount 1 .* count 2 datatype 8 op 0 root 1 comm 0x", broadcast
        )


CONFIGURED = """
dist.destroy_process_group()
options = dist.ProcessGroupNCCL.Options()
options.config.max_ctas, options.config.net_name = 4, "Socket"
store = f"file://{sys.argv[3]}-configured"
dist.init_process_group("nccl", store, rank=rank, world_size=ranks, pg_options=options)
dist.all_reduce(torch.ones(4, device="cuda"))
"""


def test_log_of_nccl_says_how_a_communicator_is_configured(nccl, tmp_path):
    """``NCCL_DEBUG=INFO`` alone writes the settings that a program has given."""
    settings = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(tmp_path / "log-%p")}
    runs = nccl(CONFIGURED, TORCH_DIST_USE_NCCL2="0", **settings)
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    files = sorted(tmp_path.glob("log-*"))
    assert len(files) == 2
    for file in files:
        written = file.read_text("utf-8")
        assert "NCCL INFO Comm config Max CTAs set to 4\n" in written
        assert "NCCL INFO Using network Socket\n" in written
        assert "Min CTAs" not in written
        assert "AllReduce" not in written
