"""What stays allocated after a function that uses one linear layer: the workspace of cuBLAS."""

from case import CUBLAS_BEFORE_2_7, Case, Figure

CASE = Case(
    title="One linear layer of one number",
    source="https://github.com/pytorch/pytorch/issues/95668",
    kind="operators",
    card="a10",
    real="A10G, a nightly of torch 2.0 with CUDA 11.8, February 2023",
    torch="2.0",
    figures={"left after the function": Figure("8519680", "bytes", "allocated")},
    environment=CUBLAS_BEFORE_2_7,
)


def measured(run: str) -> dict[str, int]:
    """Use a layer in a function, and read what is left."""
    import torch

    def use() -> None:
        model = torch.nn.Linear(1, 1, device="cuda")
        model(torch.randn(1, 1, device="cuda"))

    use()
    torch.cuda.synchronize()
    return {"left after the function": torch.cuda.memory_allocated()}
