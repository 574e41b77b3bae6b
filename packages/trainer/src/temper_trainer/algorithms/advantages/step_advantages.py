"""Compute the advantages of a step with the configured estimator, from rewards, values and KL.

Rewards are per completion, the KL penalty is per token. The estimators gae and reinforce_plus_plus
take the penalty token by token; the others subtract its sum over the trained tokens from the
completion's reward. Statistics are computed in float64, results are float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import BatchError
from temper_engine_api.reduction import sum_per_sequence
from temper_trainer.algorithms.advantages.advantage_statistics import (
    assign_to_last_token,
    compute_group_statistics,
    whiten,
)
from temper_trainer.algorithms.advantages.custom_estimators import compute_custom_advantages
from temper_trainer.algorithms.advantages.estimators.estimator import StepRewards
from temper_trainer.config.algorithm import AlgorithmConfig, list_estimators_with_input
from temper_trainer.settings.variants import Custom
from temper_trainer.types import Advantages


def estimate_advantages(
    config: AlgorithmConfig,
    *,
    samples: SequenceBatch,
    rewards: Tensor,
    values: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float | None = None,
    baselines: Tensor | None = None,
    components: Tensor | None = None,
    component_weights: Sequence[float] = (),
) -> Advantages:
    """Return the advantages of a step's samples and the metrics that describe them.

    Args:
        config: Names the estimator, its discounts, whitening and the weight of the KL penalty.
        samples: B sequences with T tokens. ``group_ids`` defines the groups; the order does not
            matter.
        rewards: [B] finite rewards. Completions whose reward failed must not be among the samples.
        values: [T] critic values before this step's first update; required if the estimator has
            the input ``values``.
        kl: [T] KL(policy, reference) from ``kl.estimate_kl``; required if the penalty has a weight.
        kl_coef: Weight of the KL penalty if a controller sets it; None takes
            ``config.kl_reward_coef``.
        baselines: [B] rewards of the greedy completions; required if the estimator has the input
            ``baselines``, and refused otherwise.
        components: [B, K] rewards whose weighted sum is ``rewards``; required if the estimator has
            the input ``components``.
        component_weights: K component weights, as for ``components``.

    Raises:
        BatchError: If an input is missing, not finite, or has the wrong shape.
    """
    coef = config.kl_reward_coef if kl_coef is None else kl_coef
    _check_rewards(config, samples=samples, rewards=rewards, values=values, kl=kl, coef=coef)
    _check_estimator_inputs(
        config,
        num_sequences=samples.num_sequences,
        baselines=baselines,
        components=components,
        num_weights=len(component_weights),
    )
    penalty = torch.zeros(samples.num_tokens, dtype=torch.float64)
    if kl is not None and coef:
        # `where` instead of a product with the mask, because an entry outside it may be NaN.
        penalty = coef * torch.where(samples.loss_mask, kl.double(), 0.0)
    # A sum and not a mean: a completion's KL is summed over its tokens.
    penalty_sum = sum_per_sequence(penalty, samples)
    step = StepRewards(
        samples=samples,
        rewards=rewards.double() - penalty_sum,
        token_rewards=compute_token_rewards(rewards, penalty=penalty, samples=samples),
        penalty=penalty_sum,
        values=values,
        baselines=baselines,
        components=components,
        component_weights=component_weights,
    )
    if isinstance(config.advantage, Custom):
        advantages, returns = compute_custom_advantages(config.advantage, step=step), None
    else:
        advantages, returns = config.advantage.estimate(step)
    if advantages.shape != (samples.num_tokens,):
        advantages = advantages[samples.sequence_index]
    # Masked here, so that an estimator need not know which tokens are trained.
    advantages = torch.where(samples.loss_mask, advantages.double(), 0.0)
    if config.whiten_advantages:
        advantages = whiten(advantages, mask=samples.loss_mask)
    return Advantages(
        advantages=advantages.float(),
        returns=None if returns is None else returns.float(),
        metrics=_describe(advantages, samples=samples, rewards=rewards),
    )


def compute_token_rewards(rewards: Tensor, *, penalty: Tensor, samples: SequenceBatch) -> Tensor:
    """Return per-token rewards: the reward at the last trained token, minus the penalty at each.

    Args:
        rewards: [B] reward per completion.
        penalty: [T] float64.
        samples: B sequences, T tokens.

    Returns:
        [T] float64.
    """
    return assign_to_last_token(rewards, samples=samples) - penalty


def _check_rewards(
    config: AlgorithmConfig,
    *,
    samples: SequenceBatch,
    rewards: Tensor,
    values: Tensor | None,
    kl: Tensor | None,
    coef: float,
) -> None:
    if rewards.shape != (samples.num_sequences,) or not bool(rewards.isfinite().all()):
        raise BatchError(
            f"rewards have shape {tuple(rewards.shape)} and start with {rewards.tolist()[:8]}, "
            f"but must be {samples.num_sequences} finite numbers, one per sample: drop the "
            "samples whose reward failed."
        )
    if (values is not None) != config.reads("values"):
        name = config.advantage.name
        if values is None:
            raise BatchError(
                f"values are missing, but algorithm.advantage is {name}: {name} needs the critic's "
                "values [T]."
            )
        raise BatchError(
            f"values are given, but algorithm.advantage is {name}, and only "
            f"{' and '.join(list_estimators_with_input('values'))} take them: pass none."
        )
    if coef and kl is None:
        raise BatchError(
            f"the KL penalty on the reward has weight {coef}, but kl is missing: pass kl [T] from "
            "kl.estimate_kl."
        )
    for name, column in (("values", values), ("kl", kl)):
        if column is not None and column.shape != (samples.num_tokens,):
            raise BatchError(
                f"{name} has shape {tuple(column.shape)}, but must be [{samples.num_tokens}], one "
                "value per token."
            )


def _check_estimator_inputs(
    config: AlgorithmConfig,
    *,
    num_sequences: int,
    baselines: Tensor | None,
    components: Tensor | None,
    num_weights: int,
) -> None:
    # Superfluous inputs are refused, too: whoever passes them expects an effect.
    if (baselines is not None) != config.reads("baselines"):
        raise BatchError(
            f"baselines are {'given' if baselines is not None else 'missing'} for "
            f"algorithm.advantage {config.advantage.name}: the rewards of the greedy completions "
            f"are for {' and '.join(list_estimators_with_input('baselines'))} alone."
        )
    has_components = components is not None and components.shape == (num_sequences, num_weights)
    if config.reads("components") and not has_components:
        raise BatchError(
            f"algorithm.advantage {config.advantage.name} needs components [B, K] and K "
            "component_weights: set reward.components."
        )


def _describe(advantages: Tensor, *, samples: SequenceBatch, rewards: Tensor) -> dict[str, float]:
    # Use rewards without the KL penalty. It differs between completions, so no group would have
    # equal rewards.
    group = compute_group_statistics(rewards, group_ids=samples.group_ids)
    metrics = {
        "groups/zero_std_fraction": group.zero_std_fraction,
        "groups/single_fraction": group.single_fraction,
    }
    trained = advantages[samples.loss_mask]
    if trained.numel():
        metrics |= {
            "advantage/mean": float(trained.mean()),
            "advantage/std": float(trained.std(correction=0)),
            "advantage/min": float(trained.min()),
            "advantage/max": float(trained.max()),
        }
    return metrics
