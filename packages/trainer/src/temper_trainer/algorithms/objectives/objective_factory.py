"""Build the objectives of a run from its configuration, and add several objectives into one."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import (
    Aggregation,
    AggregationMode,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.algorithms.objectives.distillation_objective import DistillationObjective
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective, measure_entropy
from temper_trainer.algorithms.objectives.preference_objective import PreferenceObjective
from temper_trainer.algorithms.objectives.prompt_mean import PromptMeanObjective
from temper_trainer.algorithms.objectives.supervised_losses import RewardModelObjective
from temper_trainer.algorithms.objectives.value_loss import ValueObjective
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.config.algorithm import AlgorithmConfig, BatchingConfig
from temper_trainer.config.distillation import DistillationConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.settings.variants import Custom


@register_objective("combined")
@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedObjective(Objective):
    """Weighted sum of objectives, token by token: loss = sum_i coefs[i] * parts[i]."""

    parts: tuple[Objective, ...]
    """Objectives with per-token losses and the same aggregation."""
    coefs: tuple[float, ...]
    """One weight per part."""
    aggregation: Aggregation

    def __post_init__(self) -> None:
        if (
            len(self.parts) != len(self.coefs)
            or not self.parts
            or any(part.aggregation != self.aggregation for part in self.parts)
        ):
            raise ConfigError(
                "a combined objective needs one coef per part and the same aggregation "
                f"everywhere, but is {self}."
            )

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Union of the parts' required outputs, plus the reported entropy."""
        required = (part.required_outputs for part in self.parts)
        return frozenset({HeadOutput.ENTROPY}).union(*required)

    @property
    def columns(self) -> frozenset[str]:
        """Union of the parts' columns."""
        return frozenset().union(*(part.columns for part in self.parts))

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Return the columns that the parts prepare."""
        return {
            name: column
            for part in self.parts
            for name, column in part.prepare(batch, seed=seed).items()
        }

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the weighted sum [T] of the parts' losses for one micro-batch."""
        total = torch.zeros(batch.num_tokens, device=batch.tokens.device)
        metrics: dict[str, Metric] = dict(measure_entropy(head_outputs, mask=batch.loss_mask))
        for part, coef in zip(self.parts, self.coefs, strict=True):
            terms = part(head_outputs, batch)
            if terms.level != "token":
                raise ConfigError(
                    f"objective {part.name!r} returns one loss per sequence, and cannot be added "
                    "to per-token losses."
                )
            # The weights are multiplied in here, because each part may return different ones.
            total = total + coef * (
                terms.loss if terms.weight is None else terms.loss * terms.weight
            )
            # The names differ: policy losses report policy/..., distillation losses distill/...
            metrics |= terms.metrics
        return LossTerms(loss=total, metrics=metrics)


def needs_old_logprobs(config: AlgorithmConfig, batching: BatchingConfig) -> bool:
    """Return True if a forward pass must measure old log-probs before the update.

    With one update per step the policy before the update is the current policy, and the pass (12 to
    19 % of a step) is skipped. It is still needed for a KL penalty on the reward, for rollout
    correction, and for the covariances of Clip-Cov and KL-Cov, which use the numbers before the
    update.
    """
    # At the second update of a step, the policy already differs from the sampler's.
    is_single_update = batching.num_mini_batches == 1 and batching.num_passes == 1
    correction = config.rollout_correction
    # The sampler's log-probs take the place of the old ones in the ratio, so only a comparison with
    # them still needs a pass.
    if correction is not None and correction.replaces_old_logprobs:
        return config.kl_reward_coef > 0 or bool(correction.reject)
    needs_numbers = (
        config.kl_reward_coef > 0
        or correction is not None
        or build_policy_loss(config).always_needs_old_logprobs
    )
    return not is_single_update or needs_numbers


def build_policy_loss(config: AlgorithmConfig) -> PolicyLoss:
    """Return the policy loss; a custom one is imported and constructed.

    Raises:
        ConfigError: If a custom one cannot be imported, or does not accept its arguments.
    """
    loss = config.policy_loss
    if isinstance(loss, Custom):
        return loss.build(PolicyLoss, key="algorithm.policy_loss")  # type: ignore[type-abstract]
    return loss


def build_policy_objective(
    config: AlgorithmConfig, *, old_is_current: bool = False, entropy_coef: float | None = None
) -> PolicyObjective:
    """Return the actor's objective.

    Args:
        config: Policy loss, clips, coefficients and aggregation.
        old_is_current: True if the step makes one update and no pass measured the policy before it.
        entropy_coef: Weight of the entropy if a controller sets it; None takes config.entropy_coef.
    """
    return PolicyObjective(
        loss=build_policy_loss(config),
        entropy_coef=config.entropy_coef if entropy_coef is None else entropy_coef,
        kl_coef=config.kl_loss_coef,
        kl_estimator=config.kl_estimator,
        kl_clamp=config.kl_clamp,
        old_is_current=old_is_current,
        uses_correction_weights=_has_correction_weights(config),
        aggregation=build_aggregation(config),
    )


def _has_correction_weights(config: AlgorithmConfig) -> bool:
    correction = config.rollout_correction
    return correction is not None and correction.has_weights


def add_distillation_loss(
    policy: Objective | None, *, config: DistillationConfig, algorithm: AlgorithmConfig
) -> Objective:
    """Return the policy's objective plus the distillation loss; policy may be None."""
    distillation = DistillationObjective(
        loss=config.loss,
        clamp=config.clamp,
        uses_correction_weights=_has_correction_weights(algorithm),
        aggregation=build_aggregation(algorithm),
    )
    parts: tuple[Objective, ...]
    coefs: tuple[float, ...]
    parts, coefs = (
        ((distillation,), (config.coef,))
        if policy is None
        else ((policy, distillation), (1.0, config.coef))
    )
    return CombinedObjective(parts=parts, coefs=coefs, aggregation=build_aggregation(algorithm))


def aggregate_by_prompt(objective: Objective, *, config: AlgorithmConfig) -> Objective:
    """Return the actor's objective, with weights for its tokens if the aggregation needs them."""
    if config.aggregation == "prompt_mean":
        return PromptMeanObjective(objective=objective)
    return objective


def build_value_objective(config: AlgorithmConfig) -> ValueObjective:
    """Return the critic's objective, a mean over trained tokens whatever the policy's is."""
    estimator = config.advantage
    return ValueObjective(
        clip=estimator.value_clip if isinstance(estimator, AdvantageEstimator) else None
    )


def build_pair_objective(config: TrainerConfig) -> Objective:
    """Return the objective of task dpo or rm."""
    if config.task == "rm":
        return RewardModelObjective(
            label_smoothing=config.rm.label_smoothing,
            center_coef=config.rm.center_coef,
            has_margin=config.data.train_sources["data.train"].margin_key is not None,
        )
    return PreferenceObjective(loss=config.preference)


def build_aggregation(config: AlgorithmConfig) -> Aggregation:
    """Return the contract's aggregation for the policy's per-token losses."""
    # PromptMeanObjective weighs the tokens, so that their sum is the mean over prompts.
    name = "token_sum" if config.aggregation == "prompt_mean" else config.aggregation
    return Aggregation(mode=AggregationMode(name), horizon=config.horizon)
