"""Run peft's own comparison of image generation, with models without weights and made-up images."""

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

PLACE = "method_comparison/image-gen"
PARAMETERS = 3_875_544_576
TRANSFORMER = {
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
ENCODER = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def empty(make: Callable[[], Any], dtype: Any = None) -> Any:
    """Return a model on the CPU whose weights are never written, so that they take no memory."""
    import torch

    with torch.device("meta"):
        model = make()
    if dtype is not None:
        model.to(dtype)
    return model.to_empty(device="cpu")


def move(model: Any, device: str) -> Any:
    """Move a model as ``Module.to`` does, tensor by tensor, without reading or writing weights."""
    import torch

    def moved(tensor: Any) -> Any:
        there = tensor.device.type == device
        return tensor if there else torch.empty_like(tensor, device=device)

    return model._apply(moved)


class _EnoughError(Exception):
    """The steps that are wanted were made; the source would test the model now."""


class _Tokenizer:
    """Makes 512 tokens of each prompt, as the source's does."""

    def apply_chat_template(self, *_arguments: Any, **_named: Any) -> str:
        return ""

    def __call__(self, _text: str, max_length: int, **_named: Any) -> dict[str, Any]:
        import torch

        shape = (1, max_length)
        return {
            name: torch.ones(shape, dtype=torch.int64) for name in ("input_ids", "attention_mask")
        }


class _Images(dict[str, Any]):
    """What the preparation of images returns; it can be moved to a device."""

    def to(self, device: Any) -> "_Images":
        return _Images({name: tensor.to(device) for name, tensor in self.items()})


def train(folder: Path, experiment: str, steps: int) -> Any:
    """Train with one method; return what the program would have written.

    Args:
        folder: the source's repository: its comparison and its library.
        experiment: the folder of the method's configuration, and of that one.
        steps: how many.

    Returns:
        The program's own record: of each step the reserve, and means of each hundred steps.
    """
    place = folder / PLACE
    sys.path[:0] = [str(folder / "src"), str(place)]
    os.chdir(place)
    _without_data_sets()
    _with_models()
    _without_values_on_the_cpu()
    _without_compiler()
    _with_frod()
    program = importlib.import_module("run")
    found: list[Any] = []
    evaluate, configured = program.evaluate, program.get_train_config

    def until_the_test(**named: Any) -> Any:
        if named.get("num_repeats", 1) > 1:
            raise _EnoughError
        return evaluate(**named)

    def shorter(path: str) -> Any:
        configuration = configured(path)
        configuration.max_steps = steps
        configuration.num_inference_steps = 4
        return configuration

    changed: dict[str, Any] = {
        "evaluate": until_the_test,
        "get_train_config": shorter,
        "get_sigmas": _sigmas,
        "get_base_model_info": lambda name: None,
        "get_dataset_info": lambda name: None,
        "get_peft_branch": lambda: "main",
        "get_file_size": lambda *arguments, **named: 0,
        "log_results": lambda *, train_result, **named: found.append(train_result),
        "print_verbose": lambda *arguments, **named: None,
        "tqdm": lambda steps, **named: _Silent(steps),
    }
    program.__dict__.update(changed)
    path = os.path.join("experiments", *experiment.split("/"))
    program.main(path_experiment=path, experiment_name=experiment, clean=True, bucket_name=None)
    (result,) = found
    if result.error_msg:
        raise RuntimeError(result.error_msg)
    return result


class _Silent(list[int]):
    """Steps, without a bar of progress."""

    def set_postfix(self, _shown: dict[str, Any]) -> None:
        """Show nothing."""


def _sigmas(timesteps: Any, noise_scheduler: Any, n_dim: int, dtype: Any) -> Any:
    """Do what the source's function does on the CPU, without a search for a value."""
    sigmas = noise_scheduler.sigmas.to(device="cpu", dtype=dtype)
    timesteps.to("cpu")
    return sigmas[[0] * len(timesteps)].flatten().reshape(-1, *[1] * (n_dim - 1))


def _without_data_sets() -> None:
    """Put made-up images in place of the source's."""
    import torch
    from PIL import Image

    def parts(*, train_config: Any, print_fn: Any = print) -> tuple[Any, Any, Any]:
        prompts = train_config.instance_prompts
        size, tested = train_config.resolution, train_config.valid_size + train_config.test_size
        count = len(prompts) - tested
        trained = {
            "pixel_values": [torch.empty(3, size, size) for _ in range(count)],
            "prompts": prompts[:count],
            "repeats": train_config.repeats,
        }
        image = Image.new("RGB", (size, size))
        rest = [{"raw_image": image, "prompt": prompt} for prompt in prompts[count:]]
        return trained, rest[: train_config.valid_size], rest[train_config.valid_size :]

    data, sets = types.ModuleType("data"), types.ModuleType("datasets")
    data.__dict__["get_train_valid_test_datasets"] = parts
    sys.modules.update({"data": data, "datasets": sets})


def _with_models() -> None:
    """Put models of the same sizes in place of those that the source loads."""
    import torch
    import utils
    from diffusers import Flux2KleinPipeline
    from transformers import Dinov2Config, Dinov2Model

    def prepared(images: list[Any], return_tensors: str) -> _Images:
        return _Images(pixel_values=torch.empty(len(images), 3, 224, 224))

    def judge(_name: str) -> Any:
        return empty(lambda: Dinov2Model(Dinov2Config(image_size=518, patch_size=14)))

    loads: dict[str, Callable[..., Any]] = {
        "Flux2KleinPipeline": _pipeline,
        "AutoImageProcessor": lambda name: prepared,
        "AutoModel": judge,
    }
    for name, load in loads.items():
        setattr(utils, name, types.SimpleNamespace(from_pretrained=load))
    unpack = Flux2KleinPipeline._unpack_latents_with_ids
    Flux2KleinPipeline._unpack_latents_with_ids = staticmethod(_sized(unpack))


def _without_values_on_the_cpu() -> None:
    """Skip what adapters compute of whole weights on the CPU: a minute each, and no size of it."""
    import torch

    permuted = torch.randperm

    def in_order(count: int, **named: Any) -> Any:
        if torch.device(named.get("device") or "cpu").type != "cpu":
            return permuted(count, **named)
        return torch.arange(count)

    torch.randperm = in_order
    for name in ("svd", "qr", "inv", "eigh", "solve", "pinv"):
        setattr(torch.linalg, name, _of_sizes(getattr(torch.linalg, name)))


def _of_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gives zeros of the right sizes, if it is asked on the CPU."""
    import torch
    from torch.utils._pytree import tree_map_only

    def sized(*arguments: Any, **named: Any) -> Any:
        if arguments[0].device.type != "cpu":
            return function(*arguments, **named)
        on_meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), arguments)
        found = function(*on_meta, **named)
        return tree_map_only(
            torch.Tensor, lambda tensor: torch.zeros_like(tensor, device="cpu"), found
        )

    return sized


def _without_compiler() -> None:
    """Let BOFT's own kernels not be compiled, as the number of its parameters says it was there."""
    import torch.utils.cpp_extension

    def load(**_named: Any) -> Any:
        raise OSError("there is no compiler")

    torch.utils.cpp_extension.load = load


def _with_frod() -> None:
    """Let FRoD, if the library has it, decompose nothing, and know sizes that are on the card."""
    import torch

    try:
        from peft.tuners.frod import layer, model
    except ImportError:
        return
    begin, tensors = model.FrodModel._init_frod_projections, layer.Linear._get_frod_tensors
    coalesce, converted = torch.Tensor.coalesce, torch.Tensor.to

    def unwritten(tensor: Any, *arguments: Any, **named: Any) -> Any:
        if tensor.device.type == "cpu" and arguments == (torch.float32,):
            return torch.empty(tensor.shape)
        return converted(tensor, *arguments, **named)

    def begun(self: Any, *arguments: Any, **named: Any) -> None:
        with mock.patch.object(torch.Tensor, "to", unwritten):
            begin(self, *arguments, **named)

    def projection(matrices: list[Any], _regularization_alpha: float) -> Any:
        return torch.empty(matrices[0].shape[1], matrices[0].shape[1])

    def parts(_self: Any, _projection: Any, weight: Any) -> tuple[Any, Any]:
        return torch.empty(weight.shape, dtype=weight.dtype), torch.zeros(weight.shape[1])

    def of_different_indices(tensor: Any) -> Any:
        with _announced(tensor._nnz()):
            return coalesce(tensor)

    def sized(self: Any, *arguments: Any, **named: Any) -> Any:
        size = [self.in_features] * 2
        with (
            mock.patch.object(torch.Tensor, "tolist", return_value=size),
            mock.patch.object(torch.Tensor, "coalesce", of_different_indices),
        ):
            return tensors(self, *arguments, **named)

    model.FrodModel._init_frod_projections = begun
    model._projection_from_weights = projection
    layer.FrodLayer._calculate_frod_u_and_lambda = parts
    layer.Linear._get_frod_tensors = sized


@contextmanager
def _announced(number: int) -> Iterator[None]:
    """Let the next number that is read back from the emulated card be this one."""
    from emulated_cuda.loading import loaded
    from emulated_cuda.values.operators import OPERATOR, Library

    library = Library(loaded._library.path)
    before = library.set_phase(OPERATOR)
    library.announce(number)
    try:
        yield
    finally:
        library.forget_answers()
        library.set_phase(before)


def _pipeline(_name: str, torch_dtype: Any) -> Any:
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Transformer2DModel,
    )
    from transformers import Qwen3Config, Qwen3ForCausalLM

    encoder = empty(lambda: Qwen3ForCausalLM(Qwen3Config(**ENCODER)), torch_dtype)
    encoder.tie_weights()
    transformer = empty(lambda: Flux2Transformer2DModel(**TRANSFORMER), torch_dtype)
    found = sum(parameter.numel() for parameter in transformer.parameters())
    if found != PARAMETERS:
        raise ValueError(f"the model has {found:,} parameters, the published one {PARAMETERS:,}")
    made = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=empty(AutoencoderKLFlux2, torch_dtype).eval(),
        text_encoder=encoder.eval(),
        tokenizer=None,
        transformer=transformer.eval(),
        is_distilled=False,
    )
    made.tokenizer = _Tokenizer()
    return made


def _sized(unpack: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function for images of 32 x 32: their size is a value on the card."""

    def unpacked(x: Any, x_ids: Any, height: Any = None, width: Any = None) -> Any:
        import torch

        if height is not None:
            return unpack(x, x_ids, height, width)
        images = []
        for data, places in zip(x, x_ids, strict=True):  # each name holds a tensor, as there
            rows, columns = places[:, 1].to(torch.int64), places[:, 2].to(torch.int64)
            high, wide = torch.max(rows) + 1, torch.max(columns) + 1
            flat = rows * wide + columns
            shape = (32 * 32, data.shape[1])
            image = torch.zeros(shape, device=data.device, dtype=data.dtype)
            image.scatter_(0, flat.unsqueeze(1).expand(-1, data.shape[1]), data)
            image = image.view(32, 32, data.shape[1]).permute(2, 0, 1)
            images.append(image)
            del data
        del high
        return torch.stack(images, dim=0)

    return unpacked
