"""Test the moving average of the policy's weights."""

import torch

from temper_engine_api.specs import ModelSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.runtime.self_teacher import collect_weights, update_average
from temper_trainer.runtime.worker_group import InlineWorkerGroup

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "vocab_size": 12,
}


def open_group(role: str, *, seed: int) -> InlineWorkerGroup:
    group = InlineWorkerGroup(
        role,
        engine_name="fsdp",
        config=FSDPConfig(
            model=ModelSpec(architecture=MODEL, seed=seed),
            precision=PrecisionSpec(compute="fp32"),
            optimizer=None,
            device="cpu",
        ),
    )
    group.init()
    return group


def read_weights(group: InlineWorkerGroup) -> dict[str, torch.Tensor]:
    (weights,) = group.run_on_all(collect_weights)
    assert weights is not None
    return {each.name: each.tensor for each in weights}


def test_average_keeps_the_decay_and_takes_the_rest_from_the_actor() -> None:
    actor, average = open_group("actor", seed=1), open_group("averaged_actor", seed=2)
    before, policy = read_weights(average), read_weights(actor)
    update_average(average, actor=actor, decay=0.75)
    after = read_weights(average)
    assert after.keys() == policy.keys()
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, 0.75 * before[name] + 0.25 * policy[name])
    assert not all(torch.equal(before[name], after[name]) for name in after)
    # The actor is unchanged, and decay 0 makes an exact copy of it.
    update_average(average, actor=actor, decay=0.0)
    copy = read_weights(average)
    assert all(torch.equal(copy[name], policy[name]) for name in policy)
    actor.close()
    average.close()
