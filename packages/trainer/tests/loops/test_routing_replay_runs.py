"""A run on a mixture of experts that trains with the experts which the sampler chose."""

from collections.abc import Callable
from pathlib import Path

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
