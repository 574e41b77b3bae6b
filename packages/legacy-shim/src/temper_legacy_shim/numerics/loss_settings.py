"""Settings of the old losses with the old defaults."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionSettings:
    """``policy_loss.rollout_correction``: weights and rejection by the sampler's distance."""

    rollout_is: str | None = "sequence"
    """token, sequence, or None for no weights."""
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean."""
    rollout_rs: str | None = None
    """Rejection rules, separated by commas; None does not reject."""
    rollout_rs_threshold: str | float | None = None
    """A bound for all rules, or a bound for each, separated by commas."""
    bypass_mode: bool = False
    """True if old_log_probs are the sampler's."""
    loss_type: str = "ppo_clip"
    """ppo_clip or reinforce; of the loss ``bypass_mode``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSettings:
    loss_mode: str = "vanilla"
    """See ``policy_losses.policy_loss``."""
    clip_low: float = 0.2
    """clip_ratio_low, or clip_ratio where that is null."""
    clip_high: float = 0.2
    """clip_ratio_high, or clip_ratio where that is null."""
    clip_ratio_c: float = 3.0
    """Dual clip; above 1."""
    tau_pos: float = 1.0
    """sapo, for positive advantages."""
    tau_neg: float = 1.05
    """sapo, for the others."""
    clip_cov_ratio: float = 0.0002
    """clip_cov: share of tokens without loss."""
    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of covariance."""
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    """kl_cov: share of tokens that pay."""
    ppo_kl_coef: float = 0.1
    """kl_cov: coefficient of the penalty on these tokens."""
    rollout_correction: RolloutCorrectionSettings = RolloutCorrectionSettings()
