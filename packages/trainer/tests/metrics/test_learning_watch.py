"""Warnings about steps without a learning signal."""

import pytest

from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.loops.rollouts.multi_turn import Conversation
from temper_trainer.loops.rollouts.sampled_groups import measure_round
from temper_trainer.metrics.learning_watch import LearningWatch
from temper_trainer.types import Completion, FinishReason, Prompt, Rollout, SamplingRequest

EQUAL = {"reward/mean": 1.0, "reward/std": 0.0, "groups/single_fraction": 0.0}
ZERO_STD = {"reward/std": 0.5, "groups/single_fraction": 0.0, "groups/zero_std_fraction": 1.0}
NO_GRADIENT = {"reward/std": 0.5, "actor/loss": 0.0, "actor/grad_norm": 0.0}
FINE = {"reward/std": 0.5, "actor/loss": 0.0, "actor/grad_norm": 0.1}


def observe(watch: LearningWatch, *steps: dict[str, float]) -> list[str]:
    warnings = (watch.observe(step, metrics) for step, metrics in enumerate(steps, start=1))
    return [warning for warning in warnings if warning is not None]


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (EQUAL, "all rewards of a step were equal (1)"),
        (ZERO_STD, "all completions of a prompt had the same reward, for every prompt"),
        (NO_GRADIENT, "loss and gradient were 0"),
    ],
)
def test_fifth_step_without_a_signal_is_reported(metrics: dict[str, float], reason: str) -> None:
    (warning,) = observe(LearningWatch(uses_rewards=True), FINE, *[metrics] * 9)
    assert warning.startswith(f"WARNING: no learning signal in steps 2 to 6: {reason}. ")


def test_step_with_a_signal_starts_the_count_again() -> None:
    assert not observe(LearningWatch(uses_rewards=True), *[EQUAL] * 4, FINE, *[EQUAL] * 4)


def test_steps_without_a_signal_count_whatever_their_reason() -> None:
    (warning,) = observe(LearningWatch(uses_rewards=True), *[EQUAL, ZERO_STD, NO_GRADIENT] * 2)
    assert warning.startswith(
        "WARNING: no learning signal in steps 1 to 5: all completions of a prompt had the same "
        "reward, for every prompt (the last of several reasons). Use prompts "
    )


def test_warning_is_repeated_after_ten_times_as_many_steps() -> None:
    first, second = observe(LearningWatch(uses_rewards=True), *[EQUAL] * 60)
    assert "steps 1 to 5:" in first
    assert "steps 1 to 50:" in second


def test_rewards_do_not_matter_where_a_teacher_gives_the_loss() -> None:
    assert not observe(LearningWatch(uses_rewards=False), *[EQUAL] * 9)


def test_spread_of_groups_does_not_matter_with_a_critic_or_groups_of_one() -> None:
    watch = LearningWatch(uses_rewards=True)
    assert not observe(watch, *[ZERO_STD | {"critic/loss": 0.5}] * 9)
    assert not observe(watch, *[ZERO_STD | {"groups/single_fraction": 1.0}] * 9)


def test_equal_rewards_of_a_round_have_no_deviation() -> None:
    """The mean of 256 rewards of 0.1 rounds, so the deviation from it would be 1.5e-8."""
    request = SamplingRequest(
        request_id=0, prompt_tokens=(1,), sampling=SamplingConfig(max_tokens=1), seed=0
    )
    completion = Completion(
        request_id=0,
        tokens=(3,),
        rollout_logprobs=(-0.5,),
        finish_reason=FinishReason.END_TOKEN,
        weight_version=1,
    )
    rollout = Rollout(
        prompt=Prompt(prompt_id=0, text="", tokens=(1,), answer=""),
        completion=completion,
        text="",
        reward=0.1,
        group_id=0,
        sample_id=0,
    )
    conversation = Conversation(request=request, first=completion)
    metrics = measure_round([rollout] * 256, conversations=[conversation] * 256)
    assert metrics["reward/std"] == 0.0
