"""Run small distillations: two teachers by route, as loss and reward, without and with RL."""

from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.loops import RunResult

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
SHORT = (
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "actor.engine.optimizer.lr=1e-2",
)
MODEL = (
    "{model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: "
    "1, num_attention_heads: 4, num_key_value_heads: 2, "
    "max_position_embeddings: 256}"
)


def teacher(name: str, *, seed: int, route: str) -> tuple[str, ...]:
    block = f"teachers.{name}"
    return (
        f"{block}.engine.model.architecture={MODEL}",
        f"{block}.engine.model.seed={seed}",
        f"{block}.engine.precision.compute=fp32",
        f"{block}.engine.device=cpu",
        f"{block}.route={route}",
    )


TWO = (
    *teacher("adder", seed=5, route="one"),
    *teacher("mixer", seed=6, route="two"),
    "data.train.route_key=operations",
)


@pytest.mark.parametrize(
    "distillation",
    [
        ("objective={name: forward_kl, top_k: 8}",),
        ("objective={name: top_k_reverse_kl, top_k: 8}",),
        ("objective=reverse_kl", "clamp=5.0"),
        ("objective=reverse_kl_reward",),
    ],
)
def test_policy_moves_toward_two_teachers(
    run: Run, rows: Rows, tmp_path: Path, distillation: tuple[str, ...]
) -> None:
    settings = tuple(f"distillation.{each}" for each in distillation)
    run(
        tmp_path / "run",
        *SHORT,
        "algorithm=distill",
        *TWO,
        *settings,
        "run.total_steps=3",
        "algorithm.group_size=1",
        "batching.prompts_per_step=16",
    )
    step_rows = rows(tmp_path / "run")
    assert all(
        row["teacher/adder/samples"] + row["teacher/mixer/samples"] == 16.0 for row in step_rows
    )
    assert (
        sum(row["teacher/adder/samples"] for row in step_rows)
        * sum(row["teacher/mixer/samples"] for row in step_rows)
        > 0
    )
    if "objective=reverse_kl_reward" not in distillation:
        assert step_rows[-1]["distill/divergence"] < step_rows[0]["distill/divergence"]
        assert step_rows[0]["distill/teacher_token_fraction"] == 1.0


def test_rejected_completions_are_not_distilled(run: Run, rows: Rows, tmp_path: Path) -> None:
    run(
        tmp_path / "run",
        *SHORT,
        "algorithm=distill",
        *TWO,
        # Sampler and trainer agree to rounding, so no ratio is above 2.
        "algorithm.rollout_correction={name: token, reject: {ratio_token: {low: 2.0}}}",
        "run.total_steps=1",
    )
    (row,) = rows(tmp_path / "run")
    assert row["correction/rejected_fraction"] == 1.0
    assert row["distill/divergence"] > 0
    assert row["actor/grad_norm"] == 0.0


OFF_POLICY = (
    *SHORT,
    "algorithm=distill",
    *TWO,
    "distillation.objective={name: top_k_reverse_kl, top_k: 8}",
    "data.train.completion_key=solution",
    "distillation.off_policy_fraction=0.5",
    "batching.prompts_per_step=8",
    "algorithm.group_size=1",
)


def test_half_of_a_step_is_trained_on_given_completions(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(tmp_path / "run", *OFF_POLICY, "run.total_steps=2")
    for row in rows(tmp_path / "run"):
        assert row["rollout/off_policy_fraction"] == 0.5
        assert row["teacher/adder/samples"] + row["teacher/mixer/samples"] == 8.0
        # Given completions are right, but an untrained policy solves nothing.
        assert row["reward/mean"] < 1.0
        assert row["distill/teacher_token_fraction"] == 1.0


def test_correction_leaves_given_completions_as_they_are(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(
        tmp_path / "run",
        *OFF_POLICY,
        "run.total_steps=1",
        # Their ratio is exactly 1, and those of the policy's tokens are 1 up to rounding.
        "algorithm.rollout_correction={name: mask, reject: {ratio_max: {low: 0.9, high: 1.1}}}",
    )
    (row,) = rows(tmp_path / "run")
    assert row["correction/rejected_fraction"] == 0.0
    assert row["correction/weight_mean"] == 1.0


def test_resumed_run_trains_on_the_same_given_completions(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(tmp_path / "once", *OFF_POLICY, "run.total_steps=2")
    run(tmp_path / "twice", *OFF_POLICY, "run.total_steps=1")
    run(tmp_path / "twice", *OFF_POLICY, "run.total_steps=2", "run.resume=auto")
    assert rows(tmp_path / "twice") == rows(tmp_path / "once")


def test_distillation_can_be_added_to_rl(run: Run, rows: Rows, tmp_path: Path) -> None:
    run(tmp_path / "run", *SHORT, *TWO, "distillation.coef=0.1", "run.total_steps=1")
    (row,) = rows(tmp_path / "run")
    assert row["distill/teacher_token_fraction"] == 1.0
    assert "advantage/std" in row


def test_prompt_without_a_teacher_for_its_route_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"a prompt has the route 'two', but the teachers' routes are one, three: set "
            r"data\.train\.route_key"
        ),
    ):
        run(tmp_path / "run", *SHORT, "algorithm=distill", *TWO, "teachers.mixer.route=three")
