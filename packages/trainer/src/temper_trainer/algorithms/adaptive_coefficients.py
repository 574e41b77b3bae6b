"""Controllers that adapt the weights of the KL penalty and the entropy bonus."""

import math
from dataclasses import dataclass, replace

from temper_trainer.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyController:
    """Weight of the entropy bonus; goes into checkpoints as it is."""

    coef: float
    """Current weight, never below 0 where there is a target."""
    target: float | None
    """Entropy in nats that is kept up; None keeps the weight fixed."""
    step: float
    """By how much the weight moves after a step."""

    def updated(self, *, entropy: float) -> "EntropyController":
        """The controller after a step: up where the entropy is below the target, else down, never below 0.

        Args:
            entropy: mean over the step's trained tokens, in nats.

        Source: He et al. 2025, arXiv:2505.22312, section 3.2 (adaptive entropy control).
        """
        if self.target is None:
            return self
        moved = self.coef + self.step if entropy < self.target else self.coef - self.step
        return replace(self, coef=max(0.0, moved))


def build_entropy_controller(config: AlgorithmConfig) -> EntropyController:
    """The controller a run begins with: fixed unless algorithm.entropy_target is set."""
    return EntropyController(
        coef=config.entropy_coef, target=config.entropy_target, step=config.entropy_coef_step
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KlController:
    """Weight of a KL penalty; goes into checkpoints as it is."""

    coef: float
    """Current weight."""
    target: float | None
    """KL per completion, in nats, that the weight is steered to; None keeps the weight fixed."""
    horizon: int
    """Completions over which a lasting error of 20 % or more multiplies the weight by about e^0.2."""

    def updated(self, *, kl: float, num_samples: int) -> "KlController":
        """The controller after a step.

        coef' = coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

        Args:
            kl: mean over the step's completions of the KL summed over trained tokens, in nats.
            num_samples: completions of the step.

        Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
        """
        if self.target is None or not math.isfinite(
            kl
        ):  # such a step's update is skipped; its weight would be no number ever after
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_samples / self.horizon))


def build_kl_controller(config: AlgorithmConfig) -> KlController:
    """The controller a run begins with: fixed unless algorithm.kl_target is set."""
    return KlController(
        coef=config.kl_reward_coef, target=config.kl_target, horizon=config.kl_horizon
    )
