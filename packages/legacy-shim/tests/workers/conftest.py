"""A tiny model with a tokenizer on disk, a batch of its rows, and old configs for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from temper_legacy_shim import deprecation
from temper_legacy_shim.data_proto import DataProto

VOCABULARY = 29


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget warned locations, so that each test warns again."""
    monkeypatch.setattr(deprecation, "_SEEN", set())


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")),
        eos_token="w1",
        pad_token="w0",
        unk_token="w2",
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_data() -> Callable[..., DataProto]:
    def make(num_rows: int = 4, *, prompt: int = 3, response: int = 5, **meta: object) -> DataProto:
        draw = torch.Generator().manual_seed(7)
        attention = torch.ones(num_rows, prompt + response, dtype=torch.int64)
        for row in range(num_rows):
            attention[row, : row % prompt] = 0
            attention[row, prompt + response - row % response :] = 0
        ids = torch.randint(3, VOCABULARY, attention.shape, generator=draw) * attention
        shape = (num_rows, response)
        return DataProto.from_dict(
            tensors={
                "input_ids": ids,
                "attention_mask": attention,
                "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
                "prompts": ids[:, :prompt],
                "responses": ids[:, prompt:],
                "response_mask": attention[:, prompt:],
                "old_log_probs": -3.0 - torch.rand(shape, generator=draw),
                "ref_log_prob": -3.0 - torch.rand(shape, generator=draw),
                "advantages": torch.randn(shape, generator=draw),
                "values": torch.randn(shape, generator=draw),
                "returns": torch.randn(shape, generator=draw),
            },
            meta_info={"temperature": 1.0, "micro_batch_size": 2, "use_dynamic_bsz": False, **meta},
        )

    return make


OPTIM = {"lr": 1e-2, "weight_decay": 0.01, "betas": [0.9, 0.999], "lr_warmup_steps": 0}
FP32 = {"dtype": "float32", "mixed_precision": {"param_dtype": "fp32"}, "fsdp_size": -1}


@pytest.fixture
def actor_config(model_folder: Path) -> dict[str, Any]:
    """Return an old ``actor_rollout_ref`` block."""
    return {
        "model": {"path": str(model_folder), "use_remove_padding": False},
        "actor": {
            "strategy": "fsdp2",
            "ppo_mini_batch_size": 2,
            "ppo_micro_batch_size": None,
            "ppo_micro_batch_size_per_gpu": 2,
            "use_dynamic_bsz": False,
            "ppo_epochs": 1,
            "grad_clip": 1.0,
            "clip_ratio": 0.2,
            "loss_agg_mode": "token-mean",
            "optim": OPTIM,
            "fsdp_config": FP32,
        },
        "rollout": {
            "name": "hf",
            "n": 1,
            "temperature": 1.0,
            "response_length": 6,
            "log_prob_micro_batch_size": None,
            "log_prob_micro_batch_size_per_gpu": 2,
            "log_prob_use_dynamic_bsz": False,
        },
        "ref": {"fsdp_config": FP32, "log_prob_micro_batch_size_per_gpu": 4},
    }


@pytest.fixture
def critic_config(model_folder: Path) -> dict[str, Any]:
    """Return an old ``critic`` block."""
    return {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": 2,
        "ppo_micro_batch_size": None,
        "ppo_micro_batch_size_per_gpu": 1,
        "forward_micro_batch_size_per_gpu": 4,
        "use_dynamic_bsz": False,
        "ppo_epochs": 1,
        "grad_clip": 1.0,
        "cliprange_value": 0.5,
        "optim": OPTIM,
        "model": {"path": str(model_folder), "fsdp_config": FP32},
    }
