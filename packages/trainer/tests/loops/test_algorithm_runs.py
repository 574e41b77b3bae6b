"""Run every objective and estimator in a small real run, and resume their state."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.errors import BatchError, ConfigError
from temper_trainer.loops import RunResult

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
SHORT = (
    "warm_start=null",
    "data.eval=null",
    "run.total_steps=2",
    "run.save_model=false",
    "actor.engine.optimizer.lr=1e-2",
)


LARGER = [
    # Nightly: a run differs from one of every day only in its loss or estimator, which have unit
    # tests.
    pytest.param(name, marks=pytest.mark.nightly)
    for name in ("cispo", "gmpo", "kl_cov", "sapo", "opo", "gpg")
]


@pytest.mark.parametrize("algorithm", ["gspo", "clip_cov", "remax", *LARGER])
def test_every_algorithm_runs(run: Run, rows: Rows, tmp_path: Path, algorithm: str) -> None:
    run(
        tmp_path / "run",
        *SHORT,
        f"algorithm={algorithm}",
        "algorithm.group_size=4",
        "batching.num_mini_batches=2",
    )
    step_rows = rows(tmp_path / "run")
    assert len(step_rows) == 2
    assert all(row["actor/grad_norm"] > 0 for row in step_rows)
    assert [row["policy/first_ratio_error_max"] for row in step_rows] == [0.0, 0.0]


ADVANTAGES = ("advantage/mean", "advantage/min", "advantage/max")
REMAX = (*SHORT, "algorithm=remax", "batching.prompts_per_step=16", "run.total_steps=1")


def test_remax_shapes_the_reward_of_the_greedy_completion_like_the_others(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(tmp_path / "plain", *REMAX)
    run(tmp_path / "normalised", *REMAX, "reward.shaping.normalization=step")
    (plain,), (normalised,) = rows(tmp_path / "plain"), rows(tmp_path / "normalised")
    # (r - mean) / std less (b - mean) / std is (r - b) / std.
    expected = [plain[name] / normalised["reward/std_before_normalization"] for name in ADVANTAGES]
    assert [normalised[name] for name in ADVANTAGES] == pytest.approx(expected, rel=1e-5)


def test_remax_baseline_includes_the_rewards_of_the_environment(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    for fee in ("0.0", "0.5"):
        environment = (
            "name: 'temper_trainer_test_rewards:Fee', call_end: '=', max_turns: 1, max_tokens: 27"
        )
        run(tmp_path / fee, *REMAX, f"environment={{{environment}, arguments: {{fee: {fee}}}}}")
    (free,), (dear,) = rows(tmp_path / "0.0"), rows(tmp_path / "0.5")
    assert dear["reward/mean"] == pytest.approx(free["reward/mean"] + 0.5)
    assert [dear[name] for name in ADVANTAGES] == pytest.approx([free[name] for name in ADVANTAGES])


def test_gdpo_refuses_rewards_of_an_environment(run: Run, tmp_path: Path) -> None:
    parts = ("algorithm=gdpo", "~reward.function", "reward.components={exact_match: 1.0}")
    environment = (
        "environment={name: 'temper_trainer_test_rewards:Fee', call_end: '=', "
        "max_turns: 1, arguments: {fee: 0.5}}"
    )
    with pytest.raises(
        ConfigError,
        match=r"gdpo uses only reward\.components.*gave a reward \(0\.5\)",
    ):
        run(tmp_path / "run", *SHORT, *parts, environment)


def test_rollout_correction_reports_weights_and_changes_the_update(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    correction = (
        "algorithm.rollout_correction={name: sequence, truncate_at: 1.5, "
        "self_normalize: true, reject: {k3_mean: {high: 1.0}, ratio_max: {low: 1.0e-4}}}"
    )
    run(tmp_path / "run", *SHORT, correction)
    (first, _) = rows(tmp_path / "run")
    assert first["correction/weight_mean"] == pytest.approx(1.0, abs=1e-6)
    assert first["correction/effective_sample_fraction"] == pytest.approx(1.0, abs=1e-3), (
        "the sampler has the trainer's weights"
    )
    assert first["mismatch/effective_sample_fraction"] == pytest.approx(1.0, abs=1e-3)


def test_log_probs_of_the_sampler_can_be_the_old_ones(run: Run, rows: Rows, tmp_path: Path) -> None:
    run(tmp_path / "run", *SHORT, "algorithm.rollout_correction=rollout_ratio")
    assert all(row["policy/ratio_error_max"] < 1e-3 for row in rows(tmp_path / "run"))


def test_completions_resampled_by_reward_are_trained(run: Run, rows: Rows, tmp_path: Path) -> None:
    run(tmp_path / "run", *SHORT, "algorithm.reweight=max_min", "batching.num_mini_batches=2")
    step_rows = rows(tmp_path / "run")
    # Of 4 completions of a prompt at most two are the best and the worst, unless several are.
    assert all(0.0 < row["reweight/distinct_fraction"] < 1.0 for row in step_rows)
    assert all(row["actor/grad_norm"] > 0 for row in step_rows)
    # Drawn again means other micro-batches than those that old log-probs were measured over: 1 up
    # to rounding.
    assert all(row["policy/first_ratio_error_max"] < 1e-4 for row in step_rows)


def test_dynamic_sampling_fills_a_step_with_groups_of_different_rewards(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(
        tmp_path / "run",
        *SHORT,
        "algorithm=dapo",
        "algorithm.group_size=4",
        "reward.function=temper_trainer_test_rewards:often_equal",
    )
    step_rows = rows(tmp_path / "run")
    assert [row["dynamic_sampling/kept_groups"] for row in step_rows] == [4.0, 4.0]
    assert [row["groups/zero_std_fraction"] for row in step_rows] == [0.0, 0.0]
    assert sum(row["dynamic_sampling/zero_std_groups"] for row in step_rows) > 0


def test_counts_of_an_environment_are_summed_over_the_rounds_of_a_step(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(
        tmp_path / "run",
        *SHORT,
        "algorithm=dapo",
        "algorithm.group_size=4",
        "reward.function=temper_trainer_test_rewards:often_equal",
        "environment={name: 'temper_trainer_test_rewards:Fee', call_end: '=', max_turns: 1}",
        "environment.arguments.fee=0.0",
    )
    step_rows = rows(tmp_path / "run")
    assert max(row["dynamic_sampling/rounds"] for row in step_rows) > 1
    for row in step_rows:
        num_rollouts = 4 * 4 * row["dynamic_sampling/rounds"]
        assert row["fee/steps"] == num_rollouts
        assert row["rollout/turns_mean"] == 1.0


def test_dynamic_sampling_with_too_few_groups_is_an_error(run: Run, tmp_path: Path) -> None:
    overrides = (
        "algorithm=dapo",
        "algorithm.dynamic_sampling.max_rounds=2",
        "reward.function=temper_trainer_test_rewards:always_one",
    )
    with pytest.raises(
        BatchError,
        match=r"found 0 of 4 groups with different scores in step 1, among 8 prompts of 2 rounds",
    ):
        run(tmp_path / "run", *SHORT, *overrides)


@pytest.mark.bitwise
def test_controllers_and_reward_statistics_resume_from_a_checkpoint(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    moving = (
        "warm_start=null",
        "data.eval=null",
        "actor.engine.optimizer.lr=1e-2",
        "algorithm.entropy_controller.target=9.0",
        "algorithm.entropy_controller.coef_step=0.05",
        "reward.shaping={normalization: running, scale: 2.0, overlong: {buffer_tokens: 20}}",
        "algorithm=rloo",
    )
    run(tmp_path / "whole", *moving, "run.save_model=false")
    run(tmp_path / "parts", *moving, "run.total_steps=2", "run.save_model=false")
    run(tmp_path / "parts", *moving, "run.total_steps=4", "run.resume=auto", "run.save_model=false")
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    state = (
        tmp_path / "whole" / "checkpoints" / "step_00000004" / "trainer" / "state.json"
    ).read_text()
    assert '"entropy_coef": 0.2' in state
    assert '"reward_count": 64.0' in state


def test_overlong_filter_trains_no_completion_that_was_cut(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "run", *SHORT, "sampling.max_tokens=2", "algorithm.overlong_filter=true")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    # Not by the fixture `rows`: if no token is trained, means over trained tokens are null.
    for row in map(json.loads, lines):
        assert row["batch/overlong_fraction"] == row["rollout/truncated_fraction"] > 0.9
        assert row["batch/trained_tokens"] < 0.1 * row["rollout/tokens"]


def test_losses_are_averaged_by_prompt_with_an_unbiased_kl(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(
        tmp_path / "run",
        *SHORT,
        "ref=frozen",
        "algorithm.kl_loss_coef=0.1",
        "algorithm.kl_estimator=k3_ratio",
        "algorithm.aggregation=prompt_mean",
        "batching.num_mini_batches=2",
    )
    assert [row["actor/skipped_updates"] for row in rows(tmp_path / "run")] == [0.0, 0.0]
