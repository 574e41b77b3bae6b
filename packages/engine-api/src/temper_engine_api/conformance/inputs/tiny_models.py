"""Tiny seeded models as Hugging Face directories: fast, with shapes that make bugs visible.

The vocabulary size is prime, so it is divisible by no block or rank count. Norm weights are not 1
and biases are not 0, so losing one changes the numbers. Weights are large enough for attention to
matter.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from temper_engine_api.specs import ModelType, Scalar
from temper_engine_api.vision_language import has_image_encoder

VOCABULARY = 211
PADDING = 143
"""Padding token of QWEN2_TIED. The kit's first ragged batch contains it twice."""

_COMMON: Mapping[str, Scalar] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        # Two ranks with two virtual pipeline stages each have one layer per stage.
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        # Longer than every sequence in the kit. It costs no memory: rotary embeddings are computed.
        "max_position_embeddings": 4096,
        # By default the classification head has dropout 0.1, which would make runs differ.
        "classifier_dropout": 0.0,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A tiny model: its Hugging Face config and head."""

    name: str
    """Name of its directory and id in test names."""
    architecture: Mapping[str, object]
    """Fields of its Hugging Face config, ``model_type`` among them; they override `settings`."""
    model_type: ModelType = "language_model"
    head_scale: float = 1.0
    """Factor on the language-model head; 20 puts almost all probability on one token."""
    settings: Mapping[str, Scalar] = field(default_factory=lambda: _COMMON)
    """Config fields that all tiny models share."""


QWEN2_TIED = TinyModel(
    name="qwen2-tied",
    # In transformers the padding token's embedding gets no gradient as a model input. Its
    # tied row of the output projection does get one. Batches contain this token, so an engine
    # that treats it otherwise is detected.
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
"""QWEN2_GROUPED with fewer layers, more layers, and other shapes under the same names."""

WINDOW = TinyModel(
    name="qwen2-window",
    # Two layers with full attention below two with a window of 8 tokens.
    architecture={
        **QWEN2_GROUPED.architecture,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
)
ROPE_THETA = TinyModel(
    name="qwen2-rope-theta", architecture={**QWEN2_GROUPED.architecture, "rope_theta": 1e6}
)
ROPE_SCALING = TinyModel(
    name="qwen2-rope-scaling",
    # Positions are divided by `factor`: an engine that reads only rope_theta is detected.
    architecture={
        **QWEN2_GROUPED.architecture,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
)
NORM_EPSILON = TinyModel(
    name="qwen2-norm-epsilon", architecture={**QWEN2_GROUPED.architecture, "rms_norm_eps": 0.1}
)
UNDECLARED_FIELDS = TinyModel(
    name="qwen2-undeclared-fields",
    # Fields of Gemma 2, Granite and DeepSeek-V3, which the config class of Qwen2 does not declare.
    architecture={
        **QWEN2_GROUPED.architecture,
        "final_logit_softcapping": 0.5,
        "attn_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 4,
        "logits_scaling": 4.0,
        "embedding_multiplier": 4.0,
        "residual_multiplier": 0.25,
        "routed_scaling_factor": 4.0,
        "scoring_func": "sigmoid",
        "n_group": 2,
        "topk_group": 1,
    },
)
DROPOUT = TinyModel(
    name="qwen2-dropout", architecture={**QWEN2_GROUPED.architecture, "attention_dropout": 0.5}
)
BUFFERS = TinyModel(
    name="buffers",
    architecture={
        "model_type": "gemma4_text",
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    if "gemma4_text" in CONFIG_MAPPING
    else {"model_type": "deepseek_v3", "tie_word_embeddings": False},
)
"""A model whose files contain buffers. In older versions of transformers only models with experts
have them, which an engine may reject."""

EXPERTS: Mapping[str, Scalar] = MappingProxyType(
    {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
)
"""Config of MoE models; four experts, so that two ranks have two each."""
_NARROW_EXPERTS = {**QWEN3.architecture, **EXPERTS, "num_experts_per_tok": 4}
ROUTED = TinyModel(
    name="qwen3-routed",
    architecture={**_NARROW_EXPERTS, "num_experts": 16, "moe_intermediate_size": 12},
)
"""QWEN3 with experts. Four of 16 are chosen, which together are as wide as its dense layers."""
UNROUTED = TinyModel(
    name="qwen3-unrouted",
    architecture={**_NARROW_EXPERTS, "num_experts": 4, "moe_intermediate_size": 12},
)
"""ROUTED with the four experts of each token only, so that its routers have no choice."""

LANGUAGE_MODELS = (QWEN2_TIED, QWEN2_UNTIED, QWEN2_GROUPED, LLAMA, QWEN3)


def has_experts(model: TinyModel) -> bool:
    """Return True if the model has its own MoE layers."""
    return "num_experts_per_tok" in model.architecture


def with_experts(model: TinyModel) -> TinyModel:
    """Return the model with MoE layers; each expert is half as wide as the dense layer.

    A model that has some already is returned as it is.
    """
    if has_experts(model):
        return model
    width = {**model.settings, **model.architecture}["intermediate_size"]
    architecture = {**model.architecture, **EXPERTS, "moe_intermediate_size": int(str(width)) // 2}
    return replace(model, name=f"{model.name}-experts", architecture=architecture)


def write_model(model: TinyModel, *, folder: Path, seed: int = 0) -> Path:
    """Write a model's config and weights, unless an earlier call has written them.

    Returns:
        The model's directory.
    """
    target = folder / f"{model.name}-{seed}"
    if not (target / "config.json").exists():
        network = _build(model)
        _fill(network, generator=torch.Generator().manual_seed(seed), head_scale=model.head_scale)
        network.save_pretrained(target)
    return target


def quantize_as_published(
    folder: Path, *, block_size: int = 16, surplus: str = "model.layers.61.eh_proj.weight"
) -> dict[str, Tensor]:
    """Quantize the linear layers of a written model as DeepSeek-V3 is published, in FP8.

    Args:
        folder: The model's directory.
        block_size: Rows and columns with one scale.
        surplus: Name of a tensor to add, of a layer for multi-token prediction.

    Returns:
        The dequantized weights, without the added tensor.
    """
    path = folder / "model.safetensors"
    weights, stored = load_file(path), {}
    for name, weight in list(weights.items()):
        stored[name] = weight
        if not name.endswith("proj.weight") and "proj_with_mqa" not in name:
            continue
        rows = [
            [_quantize(block) for block in row.split(block_size, dim=1)]
            for row in weight.split(block_size)
        ]
        stored[name] = torch.cat([torch.cat([block for block, _ in row], dim=1) for row in rows])
        stored[f"{name}_scale_inv"] = torch.stack(
            [torch.stack([scale for _, scale in row]) for row in rows]
        )
        weights[name] = torch.cat(
            [torch.cat([block.float() * scale for block, scale in row], dim=1) for row in rows]
        )
    stored[surplus] = torch.ones(2, 2)
    save_file(stored, path, metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [block_size] * 2}
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "quantization_config": settings}))
    return weights


def _quantize(block: Tensor) -> tuple[Tensor, Tensor]:
    scale = block.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (block / scale).to(torch.float8_e4m3fn), scale


def _build(model: TinyModel) -> PreTrainedModel:
    fields: dict[str, object] = {**model.settings, **model.architecture}
    name, encoder = str(fields.pop("model_type")), fields.pop("vision_config", None)
    if encoder is not None:
        # The fields of a vision-language model, its encoder's left out, describe the text part.
        is_tied = fields["tie_word_embeddings"]
        fields = {"text_config": fields, "vision_config": encoder, "tie_word_embeddings": is_tied}
    # transformers refuses other mappings than dicts.
    fields = json.loads(json.dumps(fields, default=dict))
    config = AutoConfig.for_model(name, **fields)
    config.bos_token_id = config.eos_token_id = None
    config.pad_token_id = model.architecture.get("pad_token_id")
    if model.model_type != "language_model":
        config.num_labels = 1
    network: PreTrainedModel = get_auto_class(config, model.model_type).from_config(
        config, dtype=torch.float32
    )
    return network


def get_auto_class(
    config: PretrainedConfig, model_type: ModelType = "language_model"
) -> type[AutoModelForCausalLM | AutoModelForImageTextToText | AutoModelForTokenClassification]:
    """Return the transformers class that builds a model with the head for its type."""
    auto: type[AutoModelForCausalLM | AutoModelForImageTextToText | AutoModelForTokenClassification]
    auto = AutoModelForTokenClassification
    if model_type == "language_model":
        has_encoder = has_image_encoder(config.model_type)
        auto = AutoModelForImageTextToText if has_encoder else AutoModelForCausalLM
    return auto


@torch.no_grad()
def _fill(network: nn.Module, *, generator: torch.Generator, head_scale: float) -> None:
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            # Some families add 1 to the norm weight, and initialize it with 0 instead of 1.
            parameter.copy_(parameter.mean().round() + 0.2 * noise)
        elif parameter.ndim == 1:
            parameter.copy_(0.1 * noise)
        elif "embed" in name or "lm_head" in name:
            parameter.copy_(0.3 * noise * (head_scale if "lm_head" in name else 1.0))
        elif "conv1d" in name:
            parameter.copy_(noise / math.sqrt(parameter.shape[2]))  # the fan-in of one channel
        else:
            # Divide by the square root of the fan-in, so that activations keep their size across
            # layers.
            parameter.copy_(noise / math.sqrt(parameter.shape[1]))
    saved = network.state_dict().keys()
    for name, buffer in network.named_buffers():
        if name in saved and buffer.is_floating_point():
            # The values differ from a new model's, so that tests notice when a buffer is not
            # loaded.
            buffer.copy_(1.0 + 0.2 * torch.randn(buffer.shape, generator=generator))
