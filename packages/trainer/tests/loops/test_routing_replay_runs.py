"""A run on a mixture of experts that trains with the experts which the sampler chose."""

from collections.abc import Callable
from pathlib import Path

from temper_trainer.loops import RunResult

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
    for name, setting in (("own", "false"), ("replayed", "true")):
        run(tmp_path / name, *MIXTURE, f"rollout.routing_replay={setting}")
    (own,), (replayed,) = (rows(tmp_path / name) for name in ("own", "replayed"))
    # The same completions: replay starts after sampling.
    assert own["reward/mean"] == replayed["reward/mean"]
    assert replayed["mismatch/kl"] < 0.5 * own["mismatch/kl"]
