"""From rewards to advantages: one door to every estimator. Statistics are float64, what leaves is float32.

A reward belongs to a completion. The KL penalty, where there is one, belongs to tokens: estimators that look at tokens (gae,
reinforce_plus_plus) get it token by token, those that look at whole completions get its sum over the trained tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import BatchError
from temper_engine_api.reduction import sum_per_sequence
from temper_trainer.algorithms.custom_algorithms import compute_custom_advantages
from temper_trainer.algorithms.group_advantages import (
    compute_gdpo_advantages,
    compute_gpg_advantages,
    compute_group_statistics,
    compute_grpo_advantages,
    compute_opo_advantages,
    compute_reinforce_plus_plus_baseline_advantages,
    compute_remax_advantages,
    compute_rloo_advantages,
)
from temper_trainer.algorithms.token_advantages import (
    compute_gae,
    compute_reinforce_plus_plus_advantages,
    place_at_last_token,
    whiten,
)
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.import_path import is_import_path
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
    """Advantages of a step's samples, by the configured estimator.

    Args:
        config: which estimator, discounts, whitening, and the weight of the KL penalty.
        samples: B sequences, T tokens; ``group_ids`` says which completions are compared, wherever they stand.
        rewards: [B] finite; completions whose reward failed are not among the samples.
        values: [T] values of the critic before this step's first update; for gae.
        kl: [T] KL(policy, reference) by token (``kl.estimate_kl``); needed where the penalty has a weight.
        kl_coef: weight of the KL penalty where a controller sets it; None takes config.kl_reward_coef.
        baselines: [B] rewards of the greedy completions; for remax.
        components: [B, K] the rewards that ``rewards`` are the weighted sum of; for gdpo.
        component_weights: their K weights; for gdpo.

    Raises:
        BatchError: an input is missing, not finite, or of another shape.
    """
    coef = config.kl_reward_coef if kl_coef is None else kl_coef
    _check(config, samples=samples, rewards=rewards, values=values, kl=kl, coef=coef)
    if (baselines is not None) != (config.advantage == "remax"):
        raise BatchError(
            f"advantages by {config.advantage} with baselines {'given' if baselines is not None else 'missing'}: remax takes the greedy "
            "completions' rewards, every other estimator none."
        )
    penalty = torch.zeros(samples.num_tokens, dtype=torch.float64)
    if kl is not None and coef:
        penalty = coef * torch.where(samples.loss_mask, kl.double(), 0.0)
    if config.advantage == "gdpo":
        if components is None or components.shape != (
            samples.num_sequences,
            len(component_weights),
        ):
            raise BatchError(
                "advantages by gdpo need components [B, K] and K component_weights: set reward.components."
            )
        held = sum_per_sequence(penalty, samples)
        advantages, returns = (
            compute_gdpo_advantages(
                components, weights=component_weights, penalty=held, samples=samples
            ),
            None,
        )
    else:
        advantages, returns = _estimate(
            config,
            samples=samples,
            rewards=rewards,
            penalty=penalty,
            values=values,
            baselines=baselines,
        )
    if config.whiten_advantages:
        advantages = whiten(advantages, mask=samples.loss_mask)
    return Advantages(
        advantages=advantages.float(),
        returns=None if returns is None else returns.float(),
        metrics=_describe(advantages, samples=samples, rewards=rewards),
    )


def token_rewards(rewards: Tensor, *, penalty: Tensor, samples: SequenceBatch) -> Tensor:
    """[T] float64: the outcome [B] at the last trained token of each sample, less the penalty [T] at every trained one."""
    return place_at_last_token(rewards, samples=samples) - penalty


def _estimate(
    config: AlgorithmConfig,
    *,
    samples: SequenceBatch,
    rewards: Tensor,
    penalty: Tensor,
    values: Tensor | None,
    baselines: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    by_token = token_rewards(rewards, penalty=penalty, samples=samples)
    whole = rewards.double() - sum_per_sequence(penalty, samples)
    name, groups = config.advantage, samples.group_ids
    if name == "gae":
        assert values is not None
        return compute_gae(
            by_token,
            values=values,
            samples=samples,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
    if name == "reinforce_plus_plus":
        return compute_reinforce_plus_plus_advantages(
            by_token, samples=samples, gamma=config.gamma
        ), None
    if name == "reinforce_plus_plus_baseline":
        return compute_reinforce_plus_plus_baseline_advantages(whole, samples=samples), None
    if is_import_path(name):
        own = compute_custom_advantages(config, rewards=whole, samples=samples)
        by_token = own if own.shape == (samples.num_tokens,) else own[samples.sequence_index]
        return torch.where(samples.loss_mask, by_token.double(), 0.0), None
    match name:
        case "rloo":
            per_sample = compute_rloo_advantages(whole, group_ids=groups)
        case "remax":
            assert baselines is not None
            per_sample = compute_remax_advantages(whole, baselines=baselines)
        case "opo":
            lengths = sum_per_sequence(samples.loss_mask.double(), samples)
            per_sample = compute_opo_advantages(whole, lengths=lengths, group_ids=groups)
        case "gpg":
            per_sample = compute_gpg_advantages(whole, group_ids=groups)
        case _:
            per_sample = compute_grpo_advantages(
                whole, group_ids=groups, scale_by_std=name == "grpo"
            )
    return torch.where(samples.loss_mask, per_sample[samples.sequence_index], 0.0), None


def _check(
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
            f"rewards must be {samples.num_sequences} finite numbers, one per sample, but have shape {tuple(rewards.shape)} and begin "
            f"{rewards.tolist()[:8]}: leave out samples whose reward failed."
        )
    if (values is not None) != (config.advantage == "gae"):
        raise BatchError(
            f"advantages by {config.advantage} with values {'given' if values is not None else 'missing'}: gae takes the critic's values, "
            "every other estimator none."
        )
    if coef and kl is None:
        raise BatchError(
            f"the reward's KL penalty has weight {coef}, but no KL was given: pass kl [T] from kl.estimate_kl."
        )
    for name, column in (("values", values), ("kl", kl)):
        if column is not None and column.shape != (samples.num_tokens,):
            raise BatchError(
                f"{name} has shape {tuple(column.shape)}, but there are {samples.num_tokens} tokens."
            )


def _describe(advantages: Tensor, *, samples: SequenceBatch, rewards: Tensor) -> dict[str, float]:
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
