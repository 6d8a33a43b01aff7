"""Forward passes and training steps of a language model of 3.4 billion parameters."""

from contextlib import nullcontext

from case import CUBLAS_BEFORE_2_7, Case, Figure

# Context -> GB of float32: forward, training; of bfloat16 autocast: forward, training.
PUBLISHED = {
    128: ("12.90", "51.39", "19.18", "51.39"),
    256: ("13.00", "51.39", "19.24", "51.39"),
    512: ("13.42", "51.38", "19.38", "51.38"),
}
WAYS = ("forward", "training", "forward, autocast", "training, autocast")

CASE = Case(
    title="A language model of 3.4 billion parameters, batch 4",
    source="https://github.com/damek/cs336-assignment2-systems/blob/main/cs336_systems/outputs/memory_viz_report.md",
    kind="training",
    card="a100",
    real="not named; torch 2.6.0 (uv.lock). Read off pictures of recordings",
    torch="2.6",
    figures={
        f"{length} tokens, {way}": Figure(
            printed, "GiB", kind="inference" if way.startswith("forward") else "training"
        )
        for length, row in PUBLISHED.items()
        for way, printed in zip(WAYS, row, strict=True)
    },
    runs=tuple(f"{length}, {way}" for length in PUBLISHED for way in WAYS),
    environment=CUBLAS_BEFORE_2_7,
    differs="Two passes to warm up, two that are measured, then one step of the optimizer.",
)


def measured(run: str) -> dict[str, int]:
    """Warm up, then measure the peak of passes or steps."""
    import torch
    from _transformer import VOCABULARY, PlainAdamW, cross_entropy, model

    given, _, way = run.partition(", ")
    length, trains = int(given), way.startswith("training")
    mixed = torch.autocast("cuda", torch.bfloat16) if "autocast" in way else nullcontext()
    network = model("2.7B", length)
    optimizer = PlainAdamW(network.parameters())
    tokens = torch.randint(0, VOCABULARY, (4, length), device="cuda")

    def passed() -> None:
        optimizer.zero_grad()
        with mixed, nullcontext() if trains else torch.no_grad():
            loss = cross_entropy(network(tokens), tokens)
        if trains:
            loss.backward()

    for turn in range(4):
        if turn == 2:
            torch.cuda.reset_peak_memory_stats()
        passed()
    if trains:
        optimizer.step()
    return {f"{length} tokens, {way}": torch.cuda.max_memory_allocated()}
