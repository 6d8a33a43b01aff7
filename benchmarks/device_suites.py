"""The test suites of other projects that ``emulated_suites.py`` runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.metadata import version

TRANSFORMERS = version("transformers")


@dataclass(frozen=True)
class Suite:
    """Tests of a project, and how they are told the device."""

    folder: str
    targets: tuple[str, ...]
    on_cpu: tuple[str, ...] = ()
    on_cuda: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Of pytest, on both devices."""
    environment: dict[str, str] = field(default_factory=dict)
    """``{device}`` in a value is replaced."""
    sources: tuple[str, ...] = (".",)
    """The folders that have the packages."""
    both_at_once: bool = False
    """Whether tests are parametrized over devices."""
    part: str = ""
    """What the targets are about."""
    copied: str = ""
    """A file of this folder that is copied into the project's ``tests``."""

    @property
    def name(self) -> str:
        """The name of the repository, and the part of its tests."""
        return f"{self.folder}: {self.part}" if self.part else self.folder


AUGMENTATION_OTHERS = tuple(
    f"test_{name}.py"
    for name in (
        *("augmentation_mix", "auto_operation", "base", "dist_mapper", "motionblur"),
        *("onnx_export", "param_validation", "perspective_rand", "presets"),
        *("random_generator", "random_generator_3d", "torch_export"),
    )
)
KORNIA = (
    ("colour, losses, morphology, metrics", ("color", "losses", "morphology", "metrics")),
    ("filters", ("filters",)),
    ("enhancement", ("enhance",)),
    ("geometry", ("geometry",)),
    *(
        (f"augmentation: {part}", tuple(f"augmentation/{path}" for path in paths))
        for part, paths in (
            ("containers, 3D", ("container", "_2d", "_3d")),
            ("operations", ("test_augmentation.py",)),
            ("gradients", ("test_backward.py", "test_backward_3d.py")),
            ("generators, export, others", AUGMENTATION_OTHERS),
        )
    ),
    ("features, sensors, others", ("feature", "sensors", "contrib", "core", "image", "utils")),
)

SUITES = (
    *(
        Suite(
            "kornia",
            tuple(f"tests/{folder}" for folder in folders),
            ("--device=cpu", "--dtype=float32"),
            ("--device=cuda", "--dtype=float32"),
            part=part,
        )
        for part, folders in KORNIA
    ),
    Suite(
        "pytorch-metric-learning",
        ("tests/distances", "tests/reducers", "tests/regularizers", "tests/miners"),
        environment={"TEST_DEVICE": "{device}", "TEST_DTYPES": "float32"},
        sources=("src",),
        part="distances, reducers, regularizers, miners",
    ),
    Suite("piq", ("tests",), both_at_once=True),
    Suite(
        "pytorch-image-models",
        ("tests/test_layers.py", "tests/test_layers_pool.py", "tests/test_optim.py"),
        environment={"TORCH_DEVICE": "{device}"},
        part="layers, optimizers",
    ),
    Suite(
        "ignite",
        ("tests/ignite/metrics", "tests/ignite/engine"),
        both_at_once=True,
        part="metrics, engine",
    ),
    Suite(
        "pytorch_geometric",
        ("test/utils", "test/nn/aggr", "test/nn/norm", "test/nn/dense", "test/nn/pool"),
        both_at_once=True,
        part="utils, aggregation, norm, dense, pool",
    ),
    Suite(
        "linear_operator",
        ("test/operators", "test/utils", "test/functions"),
        part="operators, utils, functions",
    ),
    Suite(
        "gpytorch",
        ("test/likelihoods", "test/means", "test/distributions"),
        part="likelihoods, means, distributions",
    ),
    Suite(
        "accelerate",
        ("tests/test_optimizer.py", "tests/test_scheduler.py", "tests/test_utils.py"),
        part="optimizer, scheduler, utils",
    ),
    Suite(
        "accelerate",
        ("tests/test_big_modeling.py", "tests/test_hooks.py", "tests/test_modeling_utils.py"),
        # These fill the card's memory with random numbers, which need as much on the host.
        options=("-k", "not tied_weights_memory"),
        environment={"HF_HUB_OFFLINE": "1"},
        part="hooks, large models",
    ),
    *(
        Suite(
            f"transformers-{TRANSFORMERS}",
            tuple(f"tests/transformers_models.py::{name}Test" for name in names),
            options=("-c", os.devnull, "--rootdir=."),
            copied="transformers_models.py",
            environment={"TRANSFORMERS_TEST_DEVICE": "{device}", "HF_HUB_OFFLINE": "1"},
            part=", ".join(names),
        )
        for names in (("Bert", "DistilBert"), ("Gpt2", "Llama", "T5"), ("ViT", "ResNet"))
    ),
    *(
        Suite(
            "torchmetrics",
            tuple(f"tests/unittests/{path}" for path in paths),
            options=("-c", os.devnull, "--rootdir=."),
            sources=("src", "tests"),
            part=part,
        )
        for part, paths in (
            ("regression, pairwise", ("regression", "pairwise")),
            ("clustering, nominal, segmentation", ("clustering", "nominal", "segmentation")),
            ("retrieval", ("retrieval",)),
        )
    ),
)
