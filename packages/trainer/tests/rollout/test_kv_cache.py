"""The memory of keys and values, and what it does not do."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from temper_engine_api.errors import CapabilityError
from temper_trainer.rollout.kv_cache import SLOT_ATTENTION, CausalAttention, SlotKVCache


def keys_of(memory: SlotKVCache, *, num_slots: int, length: int) -> torch.Tensor:
    """Return [n, length] cached keys of the first slots; the last position is set to -1."""
    last = torch.full((num_slots, 1, 1, 1), -1.0)
    slots = torch.arange(num_slots)
    keys, values = memory.append(
        0, last, last, slots=slots, positions=torch.full_like(slots, length - 1), length=length
    )
    assert torch.equal(keys, values)
    return keys[:, 0, :, 0]


def test_cached_keys_survive_growth_and_moves() -> None:
    memory = SlotKVCache(num_layers=1)
    memory.reserve(num_slots=3, length=2, max_length=500)
    prompts = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[:, None, :, None]
    memory.write(0, prompts, prompts, slots=torch.tensor([0, 2, 1]), rows=torch.tensor([0, 0, 1]))
    memory.reserve(num_slots=3, length=200, max_length=500)
    memory.copy_slot(source=2, target=1)
    memory.reserve(num_slots=2, length=300, max_length=500)
    assert keys_of(memory, num_slots=2, length=3).tolist() == [[1, 2, -1], [1, 2, -1]]
    # Grown room is zeros, never garbage.
    assert keys_of(memory, num_slots=2, length=300)[:, 3:299].abs().max() == 0


def test_model_with_softcapping_is_refused() -> None:
    shape = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = AutoConfig.for_model(
        "gemma2", num_key_value_heads=1, head_dim=8, pad_token_id=0, **shape
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=SLOT_ATTENTION)
    with pytest.raises(CapabilityError, match="Gemma2Attention uses attention softcapping"):
        model(input_ids=torch.tensor([[3, 4]]), use_cache=False, slots=CausalAttention())
