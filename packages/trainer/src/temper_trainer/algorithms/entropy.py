"""The controller of the entropy bonus's weight."""

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


def entropy_controller(config: AlgorithmConfig) -> EntropyController:
    """The controller a run begins with: fixed unless algorithm.entropy_target is set."""
    return EntropyController(
        coef=config.entropy_coef, target=config.entropy_target, step=config.entropy_coef_step
    )
