"""Hugging Face models on disk or from scratch: their configuration, and their tensors one at a time, float32."""

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from temper_engine_api.errors import ConfigError, WeightError
from temper_engine_api.specs import ModelSpec
from temper_engine_megatron.huggingface import expert_names

SCALAR_HEAD = "score."

TensorReader = Callable[[str], Tensor]
"""A full float32 tensor by name."""


def load_hf_config(spec: ModelSpec) -> PretrainedConfig:
    """The model's own configuration.

    Raises:
        ConfigError: transformers knows no such architecture, or foreign code was asked for.
    """
    if spec.trust_remote_code:
        raise ConfigError(
            "model.trust_remote_code is True, but the Megatron engine runs Megatron's own models: set it to False."
        )
    if spec.path is not None:
        if not Path(spec.path).is_dir():
            raise ConfigError(
                f"model.path is {spec.path!r}, which is no directory here: name a local directory of a Hugging Face model, and download "
                "one that lies on the Hub first."
            )
        return AutoConfig.from_pretrained(spec.path)
    fields = dict(spec.architecture)
    name = str(fields.pop("model_type"))
    try:
        return AutoConfig.for_model(name, **fields)
    except ValueError as error:
        raise ConfigError(
            f"model.architecture.model_type is {name!r}, which this version of transformers does not know: "
            "use a model type such as qwen2, qwen3, qwen3_moe, llama or mistral."
        ) from error


def list_weight_modules(spec: ModelSpec, hf_config: PretrainedConfig) -> tuple[str, ...]:
    """Names of transformers' modules that have parameters of their own, in the order of the model; nothing is allocated."""
    described = copy.deepcopy(hf_config)
    auto = AutoModelForCausalLM
    if spec.model_type != "language_model":
        auto, described.num_labels = AutoModelForTokenClassification, 1
    with torch.device("meta"):
        network = auto.from_config(described)
    return tuple(
        name
        for name, module in network.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    )


@contextmanager
def open_initial_weights(
    spec: ModelSpec, hf_config: PretrainedConfig, *, names: Collection[str]
) -> Iterator[TensorReader]:
    """A function from name to full float32 tensor, for these names.

    A value or reward head that the files lack is drawn from the model's seed.

    Raises:
        WeightError: the files lack other names, or hold unexpected ones.
    """
    if spec.path is None:
        fresh = _fresh_tensors(spec, hf_config)
        yield fresh.__getitem__
        return
    places = _places(Path(spec.path))
    lacking = {name for name in names if name not in places}
    new_head = {name for name in lacking if name.startswith(SCALAR_HEAD)}
    # Where no language-model head is trained, or it is the embedding, a copy in the files does no harm.
    needless = set() if "lm_head.weight" in names else {"lm_head.weight"}
    missing, surplus = sorted(lacking - new_head), sorted(places.keys() - set(names) - needless)
    if missing or surplus:
        raise WeightError(
            f"the weights in {spec.path} do not match their config: missing {missing[:5]}, unexpected {surplus[:5]}."
        )

    def read(name: str) -> Tensor:
        if name in new_head:
            return _new_head(spec, hf_config, is_bias=name.endswith("bias"))
        with safe_open(places[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.float()

    yield read


def _places(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    if not places:
        raise WeightError(
            f"{folder} holds no safetensors files: model.path is a Hugging Face model directory with its weights."
        )
    return places


def _fresh_tensors(spec: ModelSpec, hf_config: PretrainedConfig) -> dict[str, Tensor]:
    """As transformers initialises them; they depend on the seed alone."""
    auto = AutoModelForCausalLM
    if spec.model_type != "language_model":
        auto, hf_config.num_labels = AutoModelForTokenClassification, 1
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            spec.seed
        )  # without the GPUs, whose streams go on as they were
        network = auto.from_config(hf_config, dtype=torch.float32)
    return dict(
        part
        for name, tensor in network.state_dict().items()
        for part in expert_names.split(name, tensor)
    )


def _new_head(spec: ModelSpec, hf_config: PretrainedConfig, *, is_bias: bool) -> Tensor:
    if is_bias:
        return torch.zeros(1)
    draw = torch.Generator().manual_seed(spec.seed)
    return torch.randn(1, hf_config.hidden_size, generator=draw) * float(
        hf_config.initializer_range
    )
