"""From the configuration to the objectives of a run, and whether the step needs a pass for old log-probs."""

from temper_trainer.algorithms.aggregation import aggregation_of
from temper_trainer.algorithms.policy_loss import PolicyObjective
from temper_trainer.algorithms.sft_loss import SftObjective
from temper_trainer.algorithms.value_loss import ValueObjective
from temper_trainer.config.algorithm import AlgorithmConfig, BatchingConfig


def needs_old_logprobs(config: AlgorithmConfig, batching: BatchingConfig) -> bool:
    """Whether old log-probs must be measured before the update.

    With one update per step the policy before it is the policy itself, and the pass (12 to 19 % of a step) is saved, unless a KL penalty
    on the reward needs the numbers before advantages can be computed.
    """
    is_single_update = batching.num_mini_batches == 1 and batching.num_passes == 1
    return not is_single_update or config.kl_reward_coef > 0


def policy_objective(config: AlgorithmConfig, *, old_is_current: bool = False) -> PolicyObjective:
    """The actor's.

    Args:
        config: clips, coefficients and aggregation.
        old_is_current: True where ``needs_old_logprobs`` is False.
    """
    return PolicyObjective(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_loss_coef,
        kl_estimator=config.kl_estimator,
        old_is_current=old_is_current,
        aggregation=aggregation_of(config),
    )


def value_objective(config: AlgorithmConfig) -> ValueObjective:
    """The critic's: a mean over trained tokens, whatever the policy's aggregation."""
    return ValueObjective(clip=config.value_clip)


def sft_objective() -> SftObjective:
    """Of supervised fine-tuning and the warm start."""
    return SftObjective()
