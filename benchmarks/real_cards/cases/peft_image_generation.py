"""Thirty-one methods of fine-tuning FLUX.2-klein-base-4B, as peft compares them on an L40S."""

from typing import Any

from _attention import table
from _flux import (
    Training,
    autoencoder,
    clean,
    evaluate,
    judge,
    latents,
    move,
    prompts,
    transformer,
)
from case import Case, Figure

LINEAR = (
    *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"),
    *("to_add_out", "to_qkv_mlp_proj", "linear_in", "linear_out"),
)
# The configuration of each method, as the comparison's folder has it, without what is the default.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "adalora": ("AdaLoraConfig", {"r": 8, "init_r": 32, "lora_alpha": 32, "target_r": 8,
        "tinit": 100, "tfinal": 200, "total_step": 750, "deltaT": 1}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, "boft_n_butterfly_factor": 2}),
    "c3a": ("C3AConfig", {"block_size": 256}),
    "deft": ("DeftConfig", {"r": 32, "para": False}),
    "deft, para": ("DeftConfig", {"r": 32, "para": True}),
    "delora": ("DeloraConfig", {"r": 32, "delora_lambda": 15}),
    "dora, rank 64": ("LoraConfig", {"r": 64, "lora_alpha": 64, "use_dora": True}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 2000, "scaling": 150.0}),
    "frod": ("FrodConfig", {}),
    "full": ("", {}),
    "glora": ("GloraConfig", {"r": 32, "config_A_B": "lora", "config_C": "lora",
        "config_D_E": "constant"}),
    "gralora": ("GraloraConfig", {"r": 32, "alpha": 32, "gralora_k": 2}),
    "hra": ("HRAConfig", {"r": 32}),
    "ia3": ("IA3Config", {"feedforward_modules": list(LINEAR)}),
    "lily": ("LilyConfig", {"r": 32, "num_B": 2, "stride_A": 1, "scaling": 1.0}),
    "ln_tuning": ("LNTuningConfig", {"target_modules": ["norm_q", "norm_k"]}),
    "loha": ("LoHaConfig", {"r": 32, "alpha": 32}),
    "lokr": ("LoKrConfig", {"r": 32, "alpha": 32}),
    "lora": ("LoraConfig", {"r": 32, "lora_alpha": 32}),
    "lora, rank 64": ("LoraConfig", {"r": 64, "lora_alpha": 64}),
    "miss": ("MissConfig", {"r": 32, "mini_r": 1}),
    "oft": ("OFTConfig", {"oft_block_size": 32, "r": 0, "use_cayley_neumann": True}),
    "peanut": ("PeanutConfig", {"r": 32, "depth": 0, "act_fn": "relu"}),
    "psoft": ("PsoftConfig", {"r": 32, "psoft_alpha": 32}),
    "pvera": ("PveraConfig", {"r": 32}),
    "randlora": ("RandLoraConfig", {"r": 32, "randlora_alpha": 640}),
    "road": ("RoadConfig", {"group_size": 64, "variant": "road_1"}),
    "shira": ("ShiraConfig", {"r": 32, "mask_type": "random"}),
    "vblora": ("VBLoRAConfig", {"r": 32, "num_vectors": 256, "vector_length": 256}),
    "vera": ("VeraConfig", {"r": 32}),
    "waveft": ("WaveFTConfig", {"n_frequency": 2592, "scaling": 25.0}),
}  # fmt: skip
# Highest reserve of all steps, and the mean allocated of steps 101 to 200.
PUBLISHED = """
adalora 11630804992 9360288409
boft 17368612864 14322012416
c3a 11586764800 8449085696
deft 11842617344 8888520960
deft,_para 11033116672 8711691724
delora 10563354624 8890464102
dora,_rank_64 13176406016 9497645312
fourierft 12935233536 8250921216
frod 10731126784 9092565591
full 39873150976 31504759040
glora 12125732864 9519550720
gralora 10729029632 8889962752
hra 47359983616 8422063237
ia3 9586081792 8253214976
lily 10624172032 8498938275
ln_tuning 9609150464 8248402176
loha 12691963904 9512993843
lokr 10846470144 8259916032
lora 10708058112 8889635072
lora,_rank_64 11383341056 9482187991
miss 10561257472 8715440384
oft 9669967872 8325140736
peanut 12398362624 9172530391
psoft 10536091648 8412467456
pvera 10567548928 8268615936
randlora 11456741376 9690448291
road 11345592320 8262553856
shira 11054088192 9198833920
vblora 10705960960 8888914176
vera 10565451776 8267436288
waveft 12985565184 8251740416
"""


_CAUSE = (
    "in part what ran before: without the text encoder and the autoencoder, which run first, the "
    "training of three methods reserves 0.7 to 1.1 % less here"
)


def _figures() -> dict[str, Figure]:
    found = {}
    for method, reserved, allocated in table(PUBLISHED):
        name = method.replace("_rank", " rank").replace("rank_", "rank ").replace(",_", ", ")
        found[f"{name}, reserve"] = Figure(reserved, "bytes", "peak reserved", cause=_CAUSE)
        found[f"{name}, allocated after a step"] = Figure(allocated, "bytes", "allocated")
    return found


CASE = Case(
    title="FLUX.2-klein-base-4B, 512 pixels, batch 2, bfloat16, checkpointed",
    source="https://github.com/huggingface/peft/tree/main/method_comparison/image-gen",
    kind="training",
    card="l40",
    real="L40S; torch 2.12.0 or 2.13.0 with CUDA 13.0, diffusers 0.38.0, transformers 5.10.2",
    torch="2.13",
    figures=_figures(),
    runs=tuple(METHODS),
    needs=("diffusers", "transformers", "peft"),
    takes="Thirty-one trainings, of 10 to 70 s each on an idle machine; `--runs` takes some.",
    differs=(
        "Five steps, an evaluation with two denoising steps, and two steps more, instead of 750. "
        "What is allocated in the middle of steps 101 to 200 is that of a step, and 512 bytes for "
        "each loss that the source keeps."
    ),
)


def measured(run: str) -> dict[str, int]:
    """Prepare, train, evaluate and train again, without the 2 MiB reserved at the start."""
    import peft
    import torch

    torch.nn.Linear(1, 1).to("cuda")
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.max_memory_reserved()
    torch.manual_seed(0)
    model = move(transformer(), "cuda")
    kind, options = METHODS[run]
    if kind:
        config = getattr(peft, kind)(**{"target_modules": list(LINEAR), **options})
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=True)
    else:
        model.requires_grad_(True)
    move(model, "cpu")
    torch.cuda.empty_cache()
    model.train()
    vae = autoencoder()
    judging = judge()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)
    cached = (*prompts(), latents(vae))
    move(model, "cuda")
    clean()
    training = Training(model, optimizer, cached)

    def allocate(step: int) -> None:
        if run == "adalora":
            model.base_model.update_and_allocate(step)

    training.steps(5, allocate)
    highest = torch.cuda.max_memory_reserved()
    evaluate(model, vae, judging)
    clean()
    allocated = training.steps(2, allocate)[-1]
    highest = max(highest, torch.cuda.max_memory_reserved())
    losses = round((150.5 - len(training.losses)) * 512)
    return {
        f"{run}, reserve": highest - start,
        f"{run}, allocated after a step": allocated - start + losses,
    }
