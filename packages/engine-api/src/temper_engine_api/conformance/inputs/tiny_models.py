"""Tiny seeded models as Hugging Face directories: small enough for milliseconds, odd enough to find what round numbers hide.

The vocabulary is a prime, so it is a multiple of nothing; norm weights are not 1 and biases not 0, so that losing one shows; weights
are large enough that attention matters and that some tokens are far likelier than others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from temper_engine_api.specs import ModelType, Scalar

VOCABULARY = 211
PADDING = 143
"""Padding token of a model that has one; twice an input in the first of the ragged mini-batches."""

_COMMON: Mapping[str, Scalar] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 256,
        # The classification head of transformers drops a tenth of its input by default.
        "classifier_dropout": 0.0,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """One tiny model."""

    name: str
    """Of its directory and of the test that uses it."""
    architecture: Mapping[str, Scalar]
    """Fields of its Hugging Face config that differ from the common ones, ``model_type`` among them."""
    model_type: ModelType = "language_model"
    """Its head."""
    head_scale: float = 1.0
    """Factor on the language-model head; 20 gives distributions with nearly all mass on one token."""
    settings: Mapping[str, Scalar] = field(default_factory=lambda: _COMMON)
    """The common fields."""


QWEN2_TIED = TinyModel(
    name="qwen2-tied",
    # In the batches as an input: its embedding then has the gradient of an output alone.
    architecture={"model_type": "qwen2", "tie_word_embeddings": True, "pad_token_id": PADDING},
)
QWEN2_UNTIED = TinyModel(
    name="qwen2-untied", architecture={"model_type": "qwen2", "tie_word_embeddings": False}
)
QWEN2_GROUPED = TinyModel(
    name="qwen2-grouped",
    architecture={"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 2},
)
LLAMA = TinyModel(
    name="llama",
    architecture={"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 2},
)
QWEN3 = TinyModel(
    name="qwen3",
    architecture={"model_type": "qwen3", "tie_word_embeddings": True, "num_key_value_heads": 2},
)
PEAKED = TinyModel(
    name="qwen2-peaked",
    architecture={"model_type": "qwen2", "tie_word_embeddings": False},
    head_scale=20.0,
)
VALUE = TinyModel(name="value", architecture=QWEN2_GROUPED.architecture, model_type="value_model")
REWARD = TinyModel(
    name="reward", architecture=QWEN2_GROUPED.architecture, model_type="reward_model"
)
OTHER_SHAPES = tuple(
    TinyModel(name=f"qwen2-{name}", architecture={**QWEN2_GROUPED.architecture, **change})
    for name, change in {
        "shallower": {"num_hidden_layers": 3},
        "deeper": {"num_hidden_layers": 5},
        "wider": {"intermediate_size": 56},
    }.items()
)
"""QWEN2_GROUPED with fewer layers, with more, and with other shapes under the same names."""

EXPERTS: Mapping[str, Scalar] = MappingProxyType(
    {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
)
"""A mixture of experts; of four, so that each of two ranks has two."""

LANGUAGE_MODELS = (QWEN2_TIED, QWEN2_UNTIED, QWEN2_GROUPED, LLAMA, QWEN3)


def with_experts(model: TinyModel) -> TinyModel:
    """The same with a mixture of experts in each layer, half as wide each as its dense layer."""
    width = {**model.settings, **model.architecture}["intermediate_size"]
    architecture = {**model.architecture, **EXPERTS, "moe_intermediate_size": int(str(width)) // 2}
    return replace(model, name=f"{model.name}-experts", architecture=architecture)


def write_model(model: TinyModel, *, folder: Path, seed: int = 0) -> Path:
    """Write config and safetensors below a folder, once; weights are a pure function of model and seed.

    Returns:
        The model's directory.
    """
    target = folder / f"{model.name}-{seed}"
    if not (target / "config.json").exists():
        network = _build(model)
        _fill(network, generator=torch.Generator().manual_seed(seed), head_scale=model.head_scale)
        network.save_pretrained(target)
    return target


def _build(model: TinyModel) -> PreTrainedModel:
    fields = {**model.settings, **model.architecture}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.bos_token_id = config.eos_token_id = None
    config.pad_token_id = model.architecture.get("pad_token_id")
    if model.model_type == "language_model":
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.num_labels = 1
    return AutoModelForTokenClassification.from_config(config, dtype=torch.float32)


@torch.no_grad()
def _fill(network: nn.Module, *, generator: torch.Generator, head_scale: float) -> None:
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.copy_(1.0 + 0.2 * noise)
        elif parameter.ndim == 1:
            parameter.copy_(0.1 * noise)
        elif "embed" in name or "lm_head" in name:
            parameter.copy_(0.3 * noise * (head_scale if "lm_head" in name else 1.0))
        else:
            parameter.copy_(noise / math.sqrt(parameter.shape[1]))
