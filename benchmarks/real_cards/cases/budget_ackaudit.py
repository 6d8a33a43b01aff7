"""A Llama of 32 layers, compiled with a budget of memory for activations: its peaks."""

from typing import Any

from case import Case, Figure

# Budget -> bytes at the peak, for each process of the source; "eager" has no budget.
PUBLISHED = {
    "eager, scale 8": {"0.0": "1642860544"},
    "endpoints, scale 8": {"0.0": "1652962816", "1.0": "1335940096"},
    "fine, scale 4": {
        "0.05": "408417792",
        "0.1": "243373568",
        "0.15": "200886272",
        "0.2": "212420608",
        "0.3": "236275712",
    },
}
RESIDENT = {"4": "120351744", "8": "221613056"}

_EAGER = (
    "8.1 MiB more for each layer, the size of four tensors of its width; not known which. The "
    "compiled rows, in which the operators are the same, are equal to the byte"
)


def _figures() -> dict[str, Figure]:
    found = {}
    for run, peaks in PUBLISHED.items():
        for budget, printed in peaks.items():
            cause = _EAGER if run.startswith("eager") else ""
            found[f"{run}, budget {budget}, peak"] = Figure(printed, "bytes", cause=cause)
        found[f"{run}, before"] = Figure(RESIDENT[run[-1]], "bytes", "allocated")
    return found


CASE = Case(
    title="A Llama of 16 to 32 layers x 256, float32, batch 2, activation_memory_budget",
    source="https://github.com/siddddd17/ackaudit/tree/main/results/measured_backward",
    kind="compiled",
    card="t4",
    real="GTX 1650 (the generation of a T4), torch 2.14.0 with CUDA 13.0",
    torch="2.14",
    rebuilt="Which transformers it was.",
    figures=_figures(),
    runs=tuple(PUBLISHED),
    needs=("transformers",),
    takes=(
        "Inductor compiles ten models of 16 to 32 layers, forward and backward; one process has "
        "eight of them."
    ),
    differs=(
        "Two passes that are measured instead of five. Its other sweeps take longer. "
        "Which transformers it was is not said."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Sweep the budgets of a run one after another in this process, as the source does."""
    found: dict[str, int] = {}
    for budget in PUBLISHED[run]:
        before, peak = _measure(run, float(budget), int(run[-1]))
        found[f"{run}, budget {budget}, peak"] = peak
        found.setdefault(f"{run}, before", before)
    return found


def _measure(run: str, budget: float, scale: int) -> tuple[int, int]:
    import torch
    from torch._functorch import config

    model = _model(4 * scale).to("cuda")
    tokens = torch.randint(0, 1000, (2, 128 * scale)).to("cuda")
    config.activation_memory_budget = budget
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    backend = "inductor" if run.startswith("Inductor") else "aot_eager"
    compiled: Any = (
        model if run.startswith("eager") else torch.compile(model, backend=backend, dynamic=False)
    )
    compiled(tokens).backward()
    model.zero_grad(set_to_none=False)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        compiled(tokens).backward()
        peak = torch.cuda.max_memory_allocated()
        model.zero_grad(set_to_none=False)
    return before, peak


def _model(layers: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaModel

    class Summed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaModel(
                LlamaConfig(
                    hidden_size=256,
                    intermediate_size=688,
                    num_hidden_layers=layers,
                    num_attention_heads=8,
                    num_key_value_heads=8,
                    vocab_size=1000,
                    use_cache=False,
                )
            )

        def forward(self, tokens: Any) -> Any:
            return self.model(input_ids=tokens).last_hidden_state.sum()

    return Summed()
