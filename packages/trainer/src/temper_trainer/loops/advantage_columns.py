"""Add advantages, returns and correction weights to a step's samples."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.metrics import Metric
from temper_trainer.algorithms.adaptive_coefficients import KlController
from temper_trainer.algorithms.advantages.advantage_statistics import discount_by_turn
from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
from temper_trainer.algorithms.importance_weights import (
    RATIO_SQUARE_MEAN,
    compute_effective_sample_fraction,
    compute_mismatch_metrics,
    compute_rollout_correction,
)
from temper_trainer.algorithms.kl import compute_mean_sequence_kl, estimate_kl, get_value_estimator
from temper_trainer.algorithms.objectives.distillation_objective import compute_teacher_reward
from temper_trainer.algorithms.objectives.policy_objective import CORRECTION_WEIGHTS
from temper_trainer.config.rollout_correction import RolloutCorrection
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.teacher.teacher_client import TEACHER_LOGPROBS, TEACHER_WEIGHTS
from temper_trainer.types import TURNS_AFTER, Rollout


def add_advantages(
    samples: SequenceBatch,
    *,
    rollouts: Sequence[Rollout],
    parents: Sequence[int],
    config: TrainerConfig,
    kl_controller: KlController,
) -> tuple[SequenceBatch, dict[str, float], KlController]:
    """Compute the advantages of a step from its rewards.

    Args:
        samples: Samples with the columns from forward passes (old and reference log-probs, values)
            and teachers.
        rollouts: Rollouts of the step.
        parents: Rollout index for each sample, see `split_branches`.
        config: Configuration of the run.
        kl_controller: Coefficient of the KL penalty on rewards.

    Returns:
        The samples with column ``advantages``, and if configured ``returns`` and correction
        weights; the metrics; the KL controller of the next step.
    """
    algorithm, columns = config.algorithm, samples.columns
    metrics: dict[str, float] = {}
    if "old_logprobs" in columns:
        metrics |= _measure_mismatch(samples)
    token_kl = None
    if algorithm.kl_reward_coef > 0:
        token_kl = estimate_kl(
            columns["old_logprobs"],
            ref_logprobs=columns["ref_logprobs"],
            estimator=get_value_estimator(algorithm.kl_estimator),
            clamp=algorithm.kl_clamp,
        )
    # The first samples belong to the rollouts. Branches must not count in the statistics of a
    # group, because their rollout would then count several times.
    has_branches = len(parents) > len(rollouts)
    estimated = estimate_advantages(
        algorithm,
        samples=samples.select(range(len(rollouts))) if has_branches else samples,
        rewards=torch.tensor([rollout.reward for rollout in rollouts]),
        values=columns.get("values"),
        kl=token_kl,
        kl_coef=kl_controller.coef,
        components=torch.tensor([rollout.components for rollout in rollouts])
        if algorithm.reads("components")
        else None,
        component_weights=tuple(config.reward.components.values()),
        baselines=torch.tensor([rollout.baseline for rollout in rollouts])
        if algorithm.reads("baselines")
        else None,
    )
    if token_kl is not None:
        mean_kl = compute_mean_sequence_kl(token_kl, samples=samples)
        metrics |= {"ref/kl": mean_kl, "ref/kl_coef": kl_controller.coef}
        # After this step's rewards: the new coefficient applies from the next step on.
        kl_controller = kl_controller.adapt(kl=mean_kl, num_samples=samples.num_sequences)
    advantages = _discount_turns(
        _copy_to_branches(estimated.advantages, samples=samples, parents=parents)
        if has_branches
        else estimated.advantages,
        samples=samples,
        discounts=[_get_turn_discount(rollouts[parent], config=config) for parent in parents],
    )
    advantages, teacher_metrics = _add_teacher_reward(advantages, samples=samples, config=config)
    added = {"advantages": advantages}
    if estimated.returns is not None:
        added["returns"] = estimated.returns
    samples, correction_metrics = _add_correction(
        samples.with_columns(added), algorithm.rollout_correction
    )
    metrics |= estimated.metrics | teacher_metrics | correction_metrics
    return samples, metrics, kl_controller


def _copy_to_branches(
    advantages: Tensor, *, samples: SequenceBatch, parents: Sequence[int]
) -> Tensor:
    """Return advantages for all samples, given those for the first ones, without branches.

    The trained tokens of a rollout have the same advantage: the configuration requires an estimator
    with one number per rollout.
    """
    num_given = len(advantages)
    is_trained = samples.loss_mask[:num_given]
    by_rollout = torch.zeros(len(parents), dtype=advantages.dtype)
    by_rollout[samples.sequence_index[:num_given][is_trained]] = advantages[is_trained]
    by_sample = by_rollout[torch.tensor(parents)]
    return torch.where(samples.loss_mask, by_sample[samples.sequence_index], 0.0)


def _get_turn_discount(rollout: Rollout, *, config: TrainerConfig) -> float:
    environment = config.get_environment(rollout.prompt.environment)
    return 1.0 if environment is None else environment.turn_discount


def _discount_turns(
    advantages: Tensor, *, samples: SequenceBatch, discounts: Sequence[float]
) -> Tensor:
    """Reduce the advantages in earlier turns by each sample's discount."""
    if set(discounts) == {1.0} or TURNS_AFTER not in samples.columns:
        return advantages
    has_one_discount = len(set(discounts)) == 1
    return discount_by_turn(
        advantages,
        turns_after=samples.columns[TURNS_AFTER],
        discount=discounts[0]
        if has_one_discount
        else torch.tensor(discounts)[samples.sequence_index],
    )


def _add_teacher_reward(
    advantages: Tensor, *, samples: SequenceBatch, config: TrainerConfig
) -> tuple[Tensor, dict[str, float]]:
    """Add each token's reward from the teachers; in task distill it replaces the advantages."""
    distillation = config.distillation
    if not config.has_teachers or not distillation.loss.is_reward:
        return advantages, {}
    reward = distillation.coef * compute_teacher_reward(
        samples.columns["old_logprobs"],
        teacher_logprobs=samples.columns[TEACHER_LOGPROBS],
        weights=samples.columns[TEACHER_WEIGHTS],
        loss_mask=samples.loss_mask,
        loss=distillation.loss,
        clamp=distillation.clamp,
    )
    metrics = {"distill/reward_mean": float(reward[samples.loss_mask].mean())}
    return (reward if config.task == "distill" else advantages + reward), metrics


def _add_correction(
    samples: SequenceBatch, config: RolloutCorrection | None
) -> tuple[SequenceBatch, dict[str, float]]:
    """Add the weights that correct the mismatch between sampler and engine, if configured."""
    if config is None:
        return samples, {}
    columns, added, metrics = samples.columns, dict[str, Tensor](), dict[str, float]()
    if config.has_weights:
        correction = compute_rollout_correction(
            config,
            samples=samples,
            old_logprobs=columns["old_logprobs"],
            rollout_logprobs=columns["rollout_logprobs"],
        )
        added[CORRECTION_WEIGHTS], metrics = correction.weights, correction.metrics
    # Replace them last: the weights above compare the sampler with the engine's log-probs.
    if config.replaces_old_logprobs:
        added["old_logprobs"] = columns["rollout_logprobs"]
    return samples.with_columns(added), metrics


def _measure_mismatch(samples: SequenceBatch) -> dict[str, float]:
    columns = samples.columns
    metrics = compute_mismatch_metrics(
        columns["old_logprobs"],
        rollout_logprobs=columns["rollout_logprobs"],
        loss_mask=samples.loss_mask,
    )
    values = {name: metric.result for name, metric in metrics.items()}
    return replace_squares(values, metrics=metrics)


def replace_squares(values: dict[str, float], *, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Replace the mean squared ratio by the effective sample fraction computed from it.

    Args:
        values: Values to log, by metric name.
        metrics: The metrics that the values were taken from.
    """
    if RATIO_SQUARE_MEAN not in metrics:
        return values
    # A ratio of two means cannot be merged over micro-batches. So the mean squared ratio is merged,
    # and the effective sample fraction is computed from it at the end.
    kept = {name: value for name, value in values.items() if name != RATIO_SQUARE_MEAN}
    return {
        **kept,
        "mismatch/effective_sample_fraction": compute_effective_sample_fraction(metrics),
    }
