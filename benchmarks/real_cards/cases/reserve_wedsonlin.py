"""The reserve after a step or a forward pass of a language model, as recorded on a card."""

from contextlib import nullcontext

from case import Case, Figure

# Tokens, way, autocast; bytes reserved and in use at the end of the recording.
PUBLISHED = {
    (128, "training", False): ("7235174400", "6816891392"),
    (256, "training", False): ("9265217536", "6837944832"),
    (512, "training", True): ("12660506624", "6838108672"),
    (1024, "training", True): ("25178406912", "6874481152"),
    (128, "inference", False): ("1763704832", "1703276544"),
    (256, "inference", False): ("1864368128", "1703333888"),
    (512, "inference", True): ("1981808640", "1703448576"),
    (1024, "inference", False): ("3204448256", "1703677952"),
}


_CAUSE = (
    "the order of requests: this is another program. The source's own, run as it is on the "
    "emulated card, gives the card's bytes in seven of these eight"
)


def _figures() -> dict[str, Figure]:
    found = {}
    for (tokens, way, _), (reserved, used) in PUBLISHED.items():
        found[f"{way}, {tokens} tokens, reserve"] = Figure(
            reserved, "bytes", "reserved", "reserve", _CAUSE
        )
        kind = "inference" if way == "inference" else "training"
        found[f"{way}, {tokens} tokens, in use"] = Figure(used, "bytes", "allocated", kind)
    return found


CASE = Case(
    title="A language model of 423 million parameters, batch 4",
    source="https://github.com/Wedsonlin/assignment2-systems/tree/main/results",
    kind="reserve",
    card="a100",
    real="not named; torch 2.11.0 with CUDA 12.8. Its workspaces are not a Hopper's",
    torch="2.11",
    figures=_figures(),
    runs=tuple(f"{way}, {tokens}" for tokens, way, _ in PUBLISHED),
    seen=(
        "The source's own program was run on an emulated card before: 7 of 8 reserves were equal "
        "to the byte. This one was written afterwards."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Warm up five times, then measure once more."""
    import torch
    from _transformer import VOCABULARY, PlainAdamW, cross_entropy, model

    way, _, given = run.partition(", ")
    tokens = int(given)
    (autocast,) = (row[2] for row in PUBLISHED if row[:2] == (tokens, way))
    network = model("medium", tokens, gathered=False)
    optimizer = PlainAdamW(network.parameters(), decay_first=True)

    def numbers(count: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (count, 4, tokens), device="cuda")

    def mixed() -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=autocast)

    inputs, last = numbers(5), numbers(1)
    if way == "inference":
        network.eval()
        with torch.inference_mode():
            for at in range(6):
                with mixed():
                    network(inputs[at] if at < 5 else last[0])
    else:
        targets, last_targets = numbers(5), numbers(1)
        output = loss = None
        for at in range(6):
            first = at < 5
            with mixed(), nullcontext():
                output = network(inputs[at] if first else last[0])
                loss = cross_entropy(output, targets[at] if first else last_targets[0])
            loss.backward()
            optimizer.step()
            if first:
                optimizer.zero_grad()
            if at == 4:
                del output, loss
    name = f"{way}, {tokens} tokens"
    return {
        f"{name}, reserve": torch.cuda.memory_reserved(),
        f"{name}, in use": torch.cuda.memory_allocated(),
    }
