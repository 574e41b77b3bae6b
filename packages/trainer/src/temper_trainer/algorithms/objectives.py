"""From the configuration to the objectives of a run, and whether the step needs a pass for old log-probs."""

from collections.abc import Mapping
from typing import TypedDict

from temper_engine_api.objective import Aggregation, Objective
from temper_trainer.algorithms.aggregation import aggregation_of
from temper_trainer.algorithms.cispo import CispoObjective
from temper_trainer.algorithms.combined import CombinedObjective
from temper_trainer.algorithms.covariance import ClipCovObjective, KlCovObjective
from temper_trainer.algorithms.distillation import ReverseKlObjective, TopKObjective
from temper_trainer.algorithms.gmpo import GmpoObjective
from temper_trainer.algorithms.gspo import GspoObjective
from temper_trainer.algorithms.kl import KlEstimator
from temper_trainer.algorithms.own import own_policy_loss
from temper_trainer.algorithms.policy_loss import PolicyObjective
from temper_trainer.algorithms.preference import DpoObjective, RewardModelObjective
from temper_trainer.algorithms.sapo import SapoObjective
from temper_trainer.algorithms.sft_loss import SftObjective
from temper_trainer.algorithms.surrogate import SurrogateObjective
from temper_trainer.algorithms.value_loss import ValueObjective
from temper_trainer.config.algorithm import AlgorithmConfig, BatchingConfig
from temper_trainer.config.distillation import DistillationConfig
from temper_trainer.config.importing import is_import_path
from temper_trainer.config.preference import PreferenceConfig

_POLICY_LOSSES: Mapping[str, type[SurrogateObjective]] = {
    "ppo": PolicyObjective,
    "gspo": GspoObjective,
    "cispo": CispoObjective,
    "gmpo": GmpoObjective,
    "clip_cov": ClipCovObjective,
    "kl_cov": KlCovObjective,
    "sapo": SapoObjective,
}


def needs_old_logprobs(config: AlgorithmConfig, batching: BatchingConfig) -> bool:
    """Whether old log-probs must be measured before the update.

    With one update per step the policy before it is the policy itself, and the pass (12 to 19 % of a step) is saved, unless something
    before the update needs the numbers: a KL penalty on the reward, rollout correction, the covariances of Clip-Cov and KL-Cov.
    """
    is_single_update = batching.num_mini_batches == 1 and batching.num_passes == 1
    correction = config.rollout_correction
    if correction is not None and correction.proximal == "rollout":
        return config.kl_reward_coef > 0 or correction.reject_kl is not None
    needs_numbers = (
        config.kl_reward_coef > 0
        or correction is not None
        or _policy_loss(config).needs_measured_old
    )
    return not is_single_update or needs_numbers


def _policy_loss(config: AlgorithmConfig) -> type[SurrogateObjective]:
    return (
        own_policy_loss(config)
        if is_import_path(config.policy_loss)
        else _POLICY_LOSSES[config.policy_loss]
    )


def policy_objective(
    config: AlgorithmConfig, *, old_is_current: bool = False, entropy_coef: float | None = None
) -> SurrogateObjective:
    """The actor's.

    Args:
        config: which surrogate, its clips and coefficients, aggregation.
        old_is_current: True where the step makes one update and nothing measured the policy before it.
        entropy_coef: where a controller sets it; None takes config.entropy_coef.
    """
    correction = config.rollout_correction
    shared = _Shared(
        entropy_coef=config.entropy_coef if entropy_coef is None else entropy_coef,
        kl_coef=config.kl_loss_coef,
        kl_estimator=config.kl_estimator,
        old_is_current=old_is_current,
        is_corrected=correction is not None
        and (correction.level != "none" or correction.reject_kl is not None),
        watches_entropy=config.entropy_target is not None,
        aggregation=aggregation_of(config),
    )
    match config.policy_loss:
        case "ppo":
            return PolicyObjective(
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                dual_clip=config.dual_clip,
                **shared,
            )
        case "gspo":
            return GspoObjective(clip_low=config.clip_low, clip_high=config.clip_high, **shared)
        case "cispo":
            return CispoObjective(clip_low=config.clip_low, clip_high=config.clip_high, **shared)
        case "gmpo":
            return GmpoObjective(clip_low=config.clip_low, clip_high=config.clip_high, **shared)
        case "clip_cov":
            return ClipCovObjective(
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                share=config.cov_share,
                low=config.cov_low,
                high=config.cov_high,
                **shared,
            )
        case "kl_cov":
            return KlCovObjective(share=config.cov_share, kl_cov_coef=config.kl_cov_coef, **shared)
        case "sapo":
            return SapoObjective(
                positive_temperature=config.sapo_positive_temperature,
                negative_temperature=config.sapo_negative_temperature,
                **shared,
            )
        case _:
            return own_policy_loss(config)(**config.policy_loss_arguments, **shared)


class _Shared(TypedDict):
    """What every surrogate takes."""

    entropy_coef: float
    kl_coef: float
    kl_estimator: KlEstimator
    old_is_current: bool
    is_corrected: bool
    watches_entropy: bool
    aggregation: Aggregation


def with_distillation(
    policy: Objective | None, *, config: DistillationConfig, algorithm: AlgorithmConfig
) -> Objective:
    """The policy's objective with the distillation's loss added; the latter alone where there is none."""
    taught: Objective
    if config.objective == "reverse_kl":
        taught = ReverseKlObjective(
            estimator=config.kl_estimator, clamp=config.clamp, aggregation=aggregation_of(algorithm)
        )
    else:
        taught = TopKObjective(
            divergence=config.objective,
            tail=config.tail,
            mixture=config.mixture,
            clamp=config.clamp,
            aggregation=aggregation_of(algorithm),
        )
    parts, coefs = (
        ((taught,), (config.coef,)) if policy is None else ((policy, taught), (1.0, config.coef))
    )
    return CombinedObjective(parts=parts, coefs=coefs, aggregation=aggregation_of(algorithm))


def value_objective(config: AlgorithmConfig) -> ValueObjective:
    """The critic's: a mean over trained tokens, whatever the policy's aggregation."""
    return ValueObjective(clip=config.value_clip)


def preference_objective(config: PreferenceConfig, *, task: str) -> Objective:
    """Of task dpo, or of task rm."""
    if task == "rm":
        return RewardModelObjective(
            label_smoothing=config.label_smoothing, center_coef=config.center_coef
        )
    return DpoObjective(
        loss=config.loss,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        length_normalized=config.length_normalized,
        has_reference=config.reference != "none",
        sft_coef=config.sft_coef,
    )


def sft_objective() -> SftObjective:
    """Of supervised fine-tuning and the warm start."""
    return SftObjective()
