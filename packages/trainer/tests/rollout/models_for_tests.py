"""Tiny seeded models, requests for them, and slow independent formulas to compare with."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from temper_engine_api.specs import ModelSpec
from temper_trainer.config.rollout import RolloutConfig, SamplingConfig
from temper_trainer.rollout.hf_model import get_language_model_class
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.types import SamplingRequest

VOCAB_SIZE = 41
END = 1
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": END,
    "pad_token_id": 0,
    # Large enough weights that the next token is neither certain nor uniform.
    "initializer_range": 0.3,
}
ARCHITECTURES = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **SHAPE},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 8, **SHAPE},
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **SHAPE},
    "mistral_sliding": {"model_type": "mistral", "sliding_window": 5, **SHAPE},
}
_EXPERTS = {
    **SHAPE,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "head_dim": 8,
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
}
FAMILIES: dict[str, dict[str, object]] = {
    # Sinks, and every second layer with a window.
    "gpt_oss": {
        **_EXPERTS,
        "num_local_experts": 4,
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    # Soft-capped scores, small enough to matter here.
    "gemma2": {
        **SHAPE,
        "head_dim": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": 1.0,
        "query_pre_attn_scalar": 8,
    },
    # Values are narrower than keys, which have 16.
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    # Other names in files than in memory.
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    # A layer with a state, of linear attention or Mamba, before one with full attention.
    "qwen3_next": {
        **_EXPERTS,
        **_LINEAR,
        "num_experts": 4,
        "shared_expert_intermediate_size": 8,
    },
    "nemotron_h": {
        **_EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "moe_shared_expert_intermediate_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
    },
    # Its routers return the experts first. Mamba before attention.
    "granitemoehybrid": {
        **_EXPERTS,
        "num_local_experts": 4,
        "shared_intermediate_size": 8,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 12,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
    },
    # An encoder of images next to a text part with windows.
    "gemma3": {
        "text_config": {
            **SHAPE,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        },
    },
    # An encoder of images, which no prompt reaches, before a text part.
    "qwen3_vl": {
        "text_config": {
            **SHAPE,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            },
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 24,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    },
}
"""Families with experts, sinks, soft-capping, linear attention or Mamba."""

WIDE = {
    "qwen3_wide": {
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        **SHAPE,
        "head_dim": 32,
    },
    "qwen3_tied": {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        **SHAPE,
        "head_dim": 32,
    },
    # A dense layer below two with experts.
    "qwen3_moe_wide": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        **SHAPE,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
}
"""Head size that vLLM's attention on CPUs supports."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one character per token: token 2 + i is the i-th of the alphabet."""
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789.,;"
    entries = {"<pad>": 0, "<eos>": 1, **{sign: 2 + i for i, sign in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.WordLevel(entries, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A reference model of transformers and the folder of its weights."""

    model: PreTrainedModel
    """The reference model, with eager attention."""
    directory: Path
    """Folder with its weights and configuration."""

    def sampler(
        self,
        *,
        max_concurrent: int = 256,
        dtype: Literal["bf16", "fp32"] = "fp32",
        routing_replay: Literal["none", "sampler"] = "none",
    ) -> HfSampler:
        """Build a sampler with the same weights."""
        config = RolloutConfig(
            max_concurrent=max_concurrent, dtype=dtype, routing_replay=routing_replay
        )
        return HfSampler(
            model=ModelSpec(path=str(self.directory)),
            tokenizer=make_tokenizer(),
            config=config,
            device="cpu",
        )

    @torch.no_grad()
    def next_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return logits [V] after one sequence, from a full forward pass without a cache."""
        logits: torch.Tensor = (
            self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
            .logits[0, -1]
            .float()
        )
        return logits

    def greedy(self, prompt: Sequence[int], *, max_tokens: int) -> tuple[int, ...]:
        """Return the greedy completion of ``generate`` of transformers."""
        inputs = torch.tensor([list(prompt)])
        settings = {
            "do_sample": False,
            "max_new_tokens": max_tokens,
            "use_cache": True,
            "attention_mask": torch.ones_like(inputs),
        }
        return tuple(self.model.generate(input_ids=inputs, **settings)[0, len(prompt) :].tolist())


def _find_architecture(name: str) -> dict[str, object]:
    if name in FAMILIES:
        return {"model_type": name, "tie_word_embeddings": False, **FAMILIES[name]}
    return {**(ARCHITECTURES | WIDE)[name]}


def make_pair(name: str, directory: Path) -> Pair:
    """Build a seeded model and save its weights."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = AutoConfig.for_model(**_find_architecture(name))
        model = (
            get_language_model_class(config).from_config(config, attn_implementation="eager").eval()
        )
    model.save_pretrained(directory)
    # Training sets use_cache false in configs; a sampler must not mind.
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "use_cache": False}))
    assert isinstance(model, PreTrainedModel)
    return Pair(model=model, directory=directory)


def make_requests(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    seeds: Sequence[int] | None = None,
) -> list[SamplingRequest]:
    """Make one request per prompt, seeded by its index unless seeds are given."""
    chosen = range(len(prompts)) if seeds is None else seeds
    return [
        SamplingRequest(request_id=i, prompt_tokens=tuple(prompt), sampling=sampling, seed=seed)
        for i, (prompt, seed) in enumerate(zip(prompts, chosen, strict=True))
    ]


def make_prompts(count: int, *, seed: int = 0, longest: int = 20) -> list[list[int]]:
    """Make random prompts of 1 to ``longest`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    return [
        torch.randint(2, VOCAB_SIZE, (int(length),), generator=generator).tolist()
        for length in lengths
    ]
