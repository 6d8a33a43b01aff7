"""Methods of fine-tuning FLUX.2-klein-base-4B, as peft compared them on an L40S in June 2026."""

import _flux

# The highest reserve, the mean allocated, and two means of the reserve: see _flux.figures.
PUBLISHED = """
adalora/flux2-klein-default 11630804992 9360288409.6 11376839884.8 11519173591.04
boft/flux2-klein-default 17368612864 14322012416 17365215477.76 17286823936
c3a/flux2-klein-default 11586764800 8449085696 11486101504 11586764800
delora/flux2-klein-default 10563354624 8890464102.4 10387466485.76 10507507466.24
fourierft/flux2-klein-default 12935233536 8250921216 12907991531.52 12331253760
full-finetuning/flux2-klein-default 39873150976 31504759040 39868830842.88 39500235407.36
gralora/flux2-klein-default 10729029632 8889962752 10549471477.76 10691280896
hra/flux2-klein-default 47359983616 8422063237.12 47323031797.76 21243625472
ia3/flux2-klein-default 9586081792 8253214976 9558630072.32 9583984640
lily/flux2-klein-default 10624172032 8498938275.84 10624172032 10322182144
ln_tuning/flux2-klein-default 9609150464 8248402176 9608018001.92 9491647037.44
loha/flux2-klein-default 12691963904 9512993843.2 12687434055.68 12691963904
lora/flux2-klein-default 10708058112 8889635072 10553665781.76 10708037140.48
miss/flux2-klein-default 10561257472 8715440384 10406802227.2 10561257472
oft/flux2-klein-default 9669967872 8325140736 9648996352 9668793466.88
peanut/flux2-klein-default 12398362624 9172530391.04 12337209671.68 12285116416
psoft/flux2-klein-default 10536091648 8412467456 10519293460.48 10482761072.64
pvera/flux2-klein-default 10567548928 8268615936 10502474301.44 10565451776
randlora/flux2-klein-default 11456741376 9690448291.84 11264327680 11416874516.48
road/flux2-klein-default 11345592320 8262553856 11341335101.44 11341377044.48
shira/flux2-klein-default 11054088192 9198833920 11051823267.84 11054088192
vblora/flux2-klein-default 10705960960 8888914176 10553644810.24 10705960960
vera/flux2-klein-default 10565451776 8267436288 10498217082.88 10561236500.48
waveft/flux2-klein-default 12985565184 8251740416 12983447060.48 12089934479.36
"""
CAUSES = {
    "waveft": (
        "probably cuDNN's plans of transposed convolutions: those made here take 1,297 MiB for "
        "the largest weight and nothing for the others; what is allocated after a step is as "
        "printed"
    )
}
EXPERIMENTS = [line.split()[0] for line in PUBLISHED.split("\n") if line]
CASE = _flux.case(
    EXPERIMENTS,
    _flux.figures(PUBLISHED, CAUSES),
    program="b2d61f5f80a7ac540fb572c077d8265a95986db8",
    torch="2.12",
    memory="44.61GiB",  # HRA reserved 44.107 GiB, and an emulated card keeps 0.5 for its context
    real="torch 2.12.0 with CUDA 13.0, diffusers 0.38.0, transformers 5.10.2",
)


def measured(run: str) -> dict[str, float]:
    """Train with one method."""
    (experiment,) = [name for name in EXPERIMENTS if _flux.named(name) == run]
    return _flux.measured(experiment)
