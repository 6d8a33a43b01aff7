"""Further methods of fine-tuning FLUX.2-klein-base-4B, which peft compared in July 2026."""

import _flux

# The highest reserve, the mean allocated, and two means of the reserve: see _flux.figures.
PUBLISHED = """
deft/flux2-klein-default 11842617344 8888520960 11689525248 11840520192
deft/flux2-klein-para 11033116672 8711691724.8 10794041344 11020533760
dora/flux2-klein-rank64 13176406016 9497645312 12924747776 13176406016
frod/flux2-klein-default 10731126784 9092565591.04 10693378048 10693378048
glora/flux2-klein-default 12125732864 9519550720 11551511674.88 12125732864
lokr/flux2-klein-lr1e-3 10846470144 8259916032 10817047101.44 10842275840
lora/flux2-klein-rank64 11383341056 9482187991.04 11376546283.52 11370758144
"""
EXPERIMENTS = [line.split()[0] for line in PUBLISHED.split("\n") if line]
CASE = _flux.case(
    EXPERIMENTS,
    _flux.figures(PUBLISHED, {}),
    program="194cb8feb21c6623f61f30305e20fdbe2b842c10",
    later="b8bf4075a0094ea4f8403781393867c7c6722550",
    torch="2.13",
    real=(
        "torch 2.13.0 with CUDA 13.0, diffusers 0.38.0, transformers 5.13.1 (lokr: in August, "
        "0.39.0 and 5.15.0)"
    ),
)


def measured(run: str) -> dict[str, float]:
    """Train with one method."""
    (experiment,) = [name for name in EXPERIMENTS if _flux.named(name) == run]
    return _flux.measured(experiment)
