"""How the difference between the sampler's log-probs and the trainer's is corrected: importance weights, masks, rejection."""

from dataclasses import dataclass
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """Weights w = p_old / p_rollout of tokens or whole completions; what is left out keeps its place in the denominators."""

    level: Literal["token", "sequence", "none"] = "token"
    """token: each token's own ratio; sequence: the product over a completion, on all its tokens; none: every weight is 1."""
    truncate_at: float | None = 2.0
    """Weights above this are lowered to it; None leaves them."""
    mask_low: float | None = None
    """Tokens (at level sequence, completions) with a ratio below this are left out; None leaves none out."""
    mask_high: float | None = None
    """Tokens (at level sequence, completions) with a ratio above this are left out; None leaves none out."""
    self_normalize: bool = False
    """Divide the weights by their mean over the step's trained tokens."""
    reject_kl: float | None = None
    """Completions whose mean KL(sampler, trainer) by token is above this, in nats, are left out; None leaves none out."""
    reject_kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's; only with reject_kl."""
    proximal: Literal["old", "rollout"] = "old"
    """What the objective's ratio is taken to: old measures log-probs before the update; rollout takes the sampler's, and then the ratio is
    the correction."""

    def __post_init__(self) -> None:
        name = "algorithm.rollout_correction"
        check_range(f"{name}.truncate_at", self.truncate_at, above=0)
        check_range(f"{name}.mask_low", self.mask_low, above=0)
        check_range(f"{name}.mask_high", self.mask_high, above=0)
        check_range(f"{name}.reject_kl", self.reject_kl, above=0)
        bounds = (self.mask_low, self.mask_high)
        if (
            self.mask_low is not None
            and self.mask_high is not None
            and self.mask_low >= self.mask_high
        ):
            raise ConfigError(
                f"{name}.mask_low is {self.mask_low} and mask_high is {self.mask_high}: the first must be below the second."
            )
        if self.level == "none" and (
            bounds != (None, None) or self.self_normalize or self.truncate_at not in (None, 2.0)
        ):
            raise ConfigError(
                f"{name}: truncate_at, mask_low, mask_high and self_normalize have no effect at level none: remove them."
            )
        if self.level == "none" and self.reject_kl is None and self.proximal == "old":
            raise ConfigError(
                f"{name}.level is none and reject_kl is not set, so nothing is corrected: set one, or remove the block."
            )
        if self.reject_kl is None and self.reject_kl_estimator != "k3":
            raise ConfigError(
                f"{name}.reject_kl_estimator has no effect without {name}.reject_kl: remove it, or set reject_kl."
            )
        if self.proximal == "rollout" and self.level != "none":
            raise ConfigError(
                f"{name}.proximal is rollout, where the objective's own ratio is the correction, and level is {self.level}, which would "
                "correct a second time: set level=none, or proximal=old."
            )
