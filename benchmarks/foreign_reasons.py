"""Why tests of other projects fail on the emulated device: one row for each cause."""

from __future__ import annotations

import re

KINDS = {
    "card": "fails on a card as well",
    "machine": "more than this machine's time, memory, compilers or network",
    "refused": "refused by name",
    "device": "the device differs from a card",
    "open": "not examined",
}

STREAMS = "streams do not run at the same time"

REASONS: tuple[tuple[str, str, str], ...] = (
    # ---- fails on a card as well ----
    (
        r"Muon only supports 2D",
        "card",
        "PyTorch's own helper gives Muon parameters that it refuses",
    ),
    (
        # On an emulated card with PyTorch 2.9.1 both counts are those that the tests expect.
        r"test_memory_stats_of_multiple_generators|test_graph_memory_stats_and_use_result",
        "card",
        "expects what PyTorch did before 2.14",
    ),
    (
        r"invalid norm type|torch.ormqr: tau|input must have the type|removed\. |ValueError not"
        r" raised|\(True, True\) != True",
        "card",
        "expects what PyTorch did before 2.14",
    ),
    (
        r"test_cuda_module_loading_env|test_mempool_multithread|allocate_in_thread_to_pool"
        r"|has no attribute 'allocator'",
        "card",
        "uses a name or a variable that PyTorch 2.14 no longer has",
    ),
    (r"test_allocator_settings|fp32 precision flag leak", "card", "expects PyTorch 2.6's settings"),
    (
        r"test_cublas_workspace_explicit",
        "card",
        "sets a variable again that PyTorch 2.14 reads once; set before, it is followed",
    ),
    (
        r"Not offloaded: \['unet'\]",
        "card",
        "the pipeline of this version does not move its network back at the end",
    ),
    (r"fixture 'net' not found", "card", "a helper that pytest takes for a test"),
    (r"KeyError: 'fname'", "card", "reads files with webdataset, and fails without a card too"),
    # ---- more than this machine has ----
    (
        r"out of memory of this machine|64bit_indexing",
        "machine",
        "needs more memory than this machine has",
    ),
    (r"Timeout \(>|session-timeout", "machine", "longer than the limit of a test"),
    (r"quanto_cuda\.so", "machine", "needs a compiler for CUDA"),
    (r"couldn't connect|urlopen|Name or service", "machine", "downloads"),
    # ---- what the device does not do ----
    (
        r"is not supported by the emulated device|cannot be captured in a CUDA graph",
        "refused",
        "refused by name: a recurrent layer with dropout, or in a graph",
    ),
    (
        r"test_record_stream|re-used to+ soon|test_events|test_to_non_blocking|concurrent_replay",
        "device",
        STREAMS,
    ),
    (
        r"fused_optimizers_(SGD|Adam|AdamW|Adagrad)_cuda",
        "device",
        # Of 12 seeds, that of the test is the only one with which SGD and Adam overflow.
        "other random numbers than a card's: with them half precision overflows",
    ),
    (r"tunableop", "device", "measures times"),
    (
        r"test_norm_fused_type_promotion",
        "device",
        "a profile of the CPU lists the operators that compute values too",
    ),
    (
        r"test_triangular_solve_large|make_graphed_callables",
        "device",
        "single precision of the CPU's products: 2e-5 where 1e-5 is allowed",
    ),
)
"""Pattern of a test's name and its error -> kind, cause. The first that is found counts."""


def reason_of(test: str, why: str) -> tuple[str, str]:
    """Return the kind and the cause of a failure, ``open`` if it was not examined."""
    for pattern, kind, reason in REASONS:
        if re.search(pattern, f"{test}: {why}"):
            return kind, reason
    return "open", ""
