"""Try all causal language models of transformers: each must be refused or computed correctly.

    python tools/model_catalogue.py [--part I/N] [--models NAME,...] > rows.md

Models are tiny and have random weights. A model is correct if the log-probs of five sequences in
one pack equal those of transformers' eager attention, one sequence at a time. Prints a row of a
Markdown table for each model type. Exits with 1 if a type is silently wrong or fails without a
refusal.
"""

import argparse
import sys
import warnings
from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model import packed_attention
from temper_engine_fsdp.model.huggingface_model import build_model
from temper_engine_fsdp.model.output_head import build_head_request
from temper_engine_fsdp.model.pack_layout import PackLayout
from temper_engine_fsdp.model.packed_model import PackedModel, build_head, make_constant_getter
from temper_engine_fsdp.model.weight_names import read_file_names

CPU = torch.device("cpu")
LENGTHS = (7, 1, 12, 7, 3)
VOCABULARY = 61
SMALL_FIELDS: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 4,  # shorter than the sequences
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SPECIAL_FIELDS: Mapping[str, Mapping[str, object]] = {
    **{
        name: {**LATENT, "first_k_dense_replace": 1}
        for name in (
            "deepseek_v2",
            "deepseek_v3",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "minicpm3",
            "youtu",
            "axk1",
        )
    },
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode", "openai-gpt"), GPT),
    **{name: {**GPT, "rotary_dim": 4} for name in ("gptj", "codegen")},
    "bamba": {"mamba_n_heads": 4},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        **{
            part: {
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
            }
            for part in ("patcher_config", "encoder_config", "decoder_config", "global_config")
        },
    },
    "falcon": {"head_dim": None, "num_kv_heads": 2},
    # Without an encoder of sound, as in the larger models.
    "gemma4": {"audio_config": None},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    "gpt_neo": {
        "num_hidden_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "window_size": 4,
    },
    "cohere_compass_text": {"layer_types": ["full_attention"] * 4},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8},
    "dots1": {"n_shared_experts": 1},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "olmoe": {"sliding_window": None},  # passes it on, but has no sliding window
    "phi3": {"original_max_position_embeddings": 64},
    "plbart": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "prophetnet": {"num_hidden_layers": None},
    "reformer": {"is_decoder": True},
    "whisper": {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "d_model": 32},
    "xlnet": {"max_position_embeddings": None},
    "zamba2": {"num_hidden_layers": 54},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields for single model types; None removes a field."""
TEXT_TYPES: Mapping[str, str] = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
"""Model type of the text part, where the default config has none."""
ENCODER_PARTS = frozenset(("vision_config", "audio_config", "audio_encoder_config", "vq_config"))
"""Configs of parts that texts do not reach."""
SMALL_PARTS: Mapping[str, object] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "patch_size": 4,
    "image_size": 8,
    "out_hidden_size": 32,
}


OUTPUT_FIELDS: Mapping[str, float] = {
    "logit_scale": 0.5,
    "logits_scaling": 0.5,
    "lm_head_multiplier": 0.5,
    "final_logit_softcapping": 5.0,
}
"""Fields that change logits. Some have defaults that do nothing, so that a mistake is not seen."""


def list_small_fields(name: str) -> dict[str, object]:
    """Return the fields of a tiny architecture of a model type."""
    special = SPECIAL_FIELDS.get(name, {})
    kind = CONFIG_MAPPING[name]
    outputs = {
        field: value
        for field, value in OUTPUT_FIELDS.items()
        if hasattr(kind, field) and not isinstance(getattr(kind, field), property)
    }
    fields = {**SMALL_FIELDS, **outputs, **special, "model_type": name}
    parts = kind.sub_configs
    if "text_config" in parts:
        text_type = TEXT_TYPES.get(name) or kind().get_text_config().model_type
        fields |= SPECIAL_FIELDS.get(text_type, {})
        text = {key: value for key, value in fields.items() if value is not None}
        fields = {"model_type": name, "text_config": {**text, "model_type": text_type}}
        fields["tie_word_embeddings"] = False
    encoders = {
        part: dict(SMALL_PARTS) for part in parts if part in ENCODER_PARTS and part not in special
    }
    return {key: value for key, value in fields.items() if value is not None} | encoders


def add_noise(model: PreTrainedModel) -> None:
    """Add random noise to all weights, large enough that wrong attention changes the outputs."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=generator),
                alpha=0.3 if parameter.ndim > 1 else 0.2,
            )


def compute_packed_logprobs(
    model: PreTrainedModel, batch: SequenceBatch, *, spec: ModelSpec
) -> Tensor:
    """Compute [T] log-probs of a pack like the engine."""
    root = PackedModel(
        model,
        head=build_head(
            model,
            config=FSDPConfig(model=spec, optimizer=None, device="cpu"),
            make_getter=make_constant_getter,
        ),
    )
    head_output = frozenset({HeadOutput.LOGPROB})
    request = build_head_request(
        batch,
        requested_outputs=head_output,
        with_gradient=frozenset(),
        trained_only=False,
        device=CPU,
    )
    with torch.no_grad():
        logprobs: Tensor = root(batch, request, PackLayout(LENGTHS, device=CPU))[0]
    return logprobs


def compute_single_logprobs(model: PreTrainedModel, batch: SequenceBatch) -> Tensor:
    """Compute [T] log-probs with transformers' eager attention, one sequence at a time."""
    # The same class: the auto classes build other ones for the text part of some models.
    reference = type(model)._from_config(
        deepcopy(model.config), dtype=torch.float32, attn_implementation="eager"
    )
    reference.eval()
    reference.load_state_dict(model.state_dict())
    parts = []
    with torch.no_grad():
        for tokens in batch.tokens.split(LENGTHS):
            logprobs = torch.log_softmax(
                reference(input_ids=tokens[None], use_cache=False).logits[0], -1
            )
            parts += [torch.zeros(1), logprobs[:-1].gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(parts)


def check_model(name: str) -> tuple[str, str]:
    """Return a verdict (right, refused, FAILS or WRONG) with its details."""
    spec = ModelSpec(architecture=list_small_fields(name))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    batch = from_sequences(
        [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS],
        loss_masks=[torch.arange(length) >= 1 for length in LENGTHS],
    )
    try:
        model = build_model(spec, attention=packed_attention.SDPA_VARLEN).eval()
        read_file_names(model).check_known()
        add_noise(model)
        packed_logprobs = compute_packed_logprobs(model, batch, spec=spec)
    except (CapabilityError, ConfigError) as error:
        return "refused", str(error)
    except Exception as error:  # noqa: BLE001  # any other error is the result of this row
        return "FAILS", f"{type(error).__name__}: {error}"
    distance = float((packed_logprobs - compute_single_logprobs(model, batch)).abs().max())
    return ("right" if distance < 1e-3 else "WRONG"), f"{distance:.0e}"


def main() -> int:
    """Print the table; return 1 if a type is wrong or fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1", help="I/N: of N parts the I-th")
    parser.add_argument("--models", help="model types, separated by commas; default: all")
    options = parser.parse_args()
    part, num_parts = (int(number) for number in options.part.split("/"))
    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if options.models:
        names = options.models.split(",")
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    packed_attention.register_kernels()
    has_failed = False
    for name in names[part - 1 :: num_parts]:
        verdict, details = check_model(name)
        has_failed |= verdict.isupper()
        print(f"| {name} | {verdict} | {' '.join(details.split())} |", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
