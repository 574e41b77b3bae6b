"""The memory of keys and values, and what it does not do."""

import pytest
import torch

from temper_trainer.rollout import kv_cache
from temper_trainer.rollout.kv_cache import CausalAttention, ScoreRule, SlotKVCache


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


def test_blocks_of_queries_give_the_same_output(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(2, heads, 7, 8) for heads in (4, 2, 2))
    rule = ScoreRule(scale=0.3, window=4, softcap=2.0, sinks=torch.randn(4))
    full = CausalAttention().attend(0, query, key, value, rule=rule)
    # 2 x 4 x 7 scores for each query, so this is three queries a block.
    monkeypatch.setattr(kv_cache, "QUERY_BLOCK_SCORES", 3 * 56)
    blocks = CausalAttention().attend(0, query, key, value, rule=rule)
    torch.testing.assert_close(blocks, full)
