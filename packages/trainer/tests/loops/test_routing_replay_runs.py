"""A run on a mixture of experts that trains with the experts which the sampler chose."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.loops import RunResult
from temper_trainer.rollout.completion_record import CompletionReplay

MIXTURE = (
    "actor.engine.model.architecture.model_type=qwen3_moe",
    "actor.engine.model.architecture.num_experts=32",
    "actor.engine.model.architecture.num_experts_per_tok=4",
    "actor.engine.model.architecture.moe_intermediate_size=32",
    "actor.engine.model.architecture.head_dim=16",
    "actor.engine.model.architecture.initializer_range=0.2",
    # Rounds differently from the engine, which computes in float32.
    "rollout.dtype=bf16",
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.total_steps=1",
    "sampling.max_tokens=24",
)


def test_replayed_experts_reduce_the_mismatch_between_sampler_and_engine(
    run: Callable[..., RunResult], rows: Callable[..., list[dict[str, float]]], tmp_path: Path
) -> None:
    for name, setting in (("own", "none"), ("replayed", "sampler")):
        run(tmp_path / name, *MIXTURE, f"rollout.routing_replay={setting}")
    (own,), (replayed,) = (rows(tmp_path / name) for name in ("own", "replayed"))
    # The same completions: replay starts after sampling.
    assert own["reward/mean"] == replayed["reward/mean"]
    assert replayed["mismatch/kl"] < 0.5 * own["mismatch/kl"]


ARCHITECTURE = "actor.engine.model.architecture"
LINEAR = (
    f"{ARCHITECTURE}.shared_expert_intermediate_size=32",
    f"{ARCHITECTURE}.linear_num_value_heads=4",
    f"{ARCHITECTURE}.linear_num_key_heads=2",
    f"{ARCHITECTURE}.linear_key_head_dim=8",
    f"{ARCHITECTURE}.linear_value_head_dim=8",
    f"{ARCHITECTURE}.full_attention_interval=2",
)
MAMBA = (
    f"{ARCHITECTURE}.layers_block_type=[linear_attention,moe,full_attention,moe]",
    f"{ARCHITECTURE}.n_routed_experts=32",
    f"{ARCHITECTURE}.moe_shared_expert_intermediate_size=32",
    f"{ARCHITECTURE}.n_group=1",
    f"{ARCHITECTURE}.topk_group=1",
    f"{ARCHITECTURE}.mamba_num_heads=4",
    f"{ARCHITECTURE}.mamba_head_dim=8",
    f"{ARCHITECTURE}.ssm_state_size=8",
    f"{ARCHITECTURE}.n_groups=2",
    f"{ARCHITECTURE}.pad_token_id=0",
)


# Nightly: makes two runs for each of three models. The test above replays experts of another every
# day.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model_type", "fields", "num_experts"),
    [
        ("qwen3_next", LINEAR, "num_experts"),
        ("qwen3_5_moe_text", LINEAR, "num_experts"),
        ("nemotron_h", MAMBA, "n_routed_experts"),
    ],
)
def test_replay_in_hybrids_leaves_the_mismatch_of_a_model_that_uses_all_experts(
    run: Callable[..., RunResult],
    rows: Callable[..., list[dict[str, float]]],
    tmp_path: Path,
    model_type: str,
    fields: tuple[str, ...],
    num_experts: str,
) -> None:
    hybrid = (
        *MIXTURE,
        *fields,
        f"{ARCHITECTURE}.model_type={model_type}",
        # Rounding to bf16 grows in the states of these layers.
        "rollout.canary_tolerance=10",
        "run.total_steps=4",
    )
    for name, overrides in (
        ("own", ()),
        ("replayed", ("rollout.routing_replay=sampler",)),
        # Routers have no choice.
        ("all", (f"{ARCHITECTURE}.{num_experts}=4",)),
    ):
        run(tmp_path / name, *hybrid, *overrides)
    own, replayed, unrouted = (
        mean(row["mismatch/kl"] for row in rows(tmp_path / name))
        for name in ("own", "replayed", "all")
    )
    assert replayed < 0.5 * own
    assert replayed < 2 * unrouted


def test_recorded_experts_are_replayed_with_their_completions(
    run: Callable[..., RunResult], rows: Callable[..., list[dict[str, float]]], tmp_path: Path
) -> None:
    setting = "rollout.routing_replay=sampler"
    run(tmp_path / "recorded", *MIXTURE, setting, "rollout.record=true")
    record = f"rollout.replay={tmp_path / 'recorded' / 'completions.jsonl'}"
    run(tmp_path / "replayed", *MIXTURE, setting, record)
    run(tmp_path / "own", *MIXTURE, record)
    recorded, replayed, own = (rows(tmp_path / n)[0] for n in ("recorded", "replayed", "own"))
    assert replayed["mismatch/kl"] == recorded["mismatch/kl"]
    assert own["mismatch/kl"] != recorded["mismatch/kl"]


def test_record_without_experts_is_refused_for_routing_replay(tmp_path: Path) -> None:
    record = tmp_path / "completions.jsonl"
    record.write_text(
        '{"key":"00","tokens":"","logprobs":"","finish_reason":"length","weight_version":0,'
        '"token_versions":""}\n'
    )
    with pytest.raises(ConfigError, match="has completions without choices of experts"):
        CompletionReplay(record, needs_experts=True)
    CompletionReplay(record, needs_experts=False)


def test_choices_of_the_old_policy_are_kept_in_all_updates_of_a_step(
    run: Callable[..., RunResult], rows: Callable[..., list[dict[str, float]]], tmp_path: Path
) -> None:
    # The updates of a step use the same samples, and change many choices.
    large_updates = "actor.engine.optimizer.lr=0.02"
    for name, num_passes, setting in (
        ("one", 1, "none"),
        ("own", 3, "none"),
        ("r2", 3, "old_policy"),
    ):
        run(
            tmp_path / name,
            *MIXTURE,
            large_updates,
            f"batching.num_passes={num_passes}",
            f"rollout.routing_replay={setting}",
        )
    one, own, r2 = (rows(tmp_path / name)[0] for name in ("one", "own", "r2"))
    # Means over the updates.
    loads = one["router/max_load"]
    assert r2["router/max_load"] == pytest.approx(loads, rel=1e-6)
    assert own["router/max_load"] != pytest.approx(loads, rel=1e-2)
