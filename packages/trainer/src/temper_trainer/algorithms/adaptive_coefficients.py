"""Controllers that adapt the weights for the KL penalty and the entropy bonus."""

import math
from dataclasses import dataclass, replace

from temper_trainer.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyController:
    """Adapt the weight of the entropy bonus; its fields are saved in checkpoints."""

    coef: float
    """Current weight; never below 0 if a target is set."""
    target: float | None
    """Entropy in nats to keep; None keeps the weight fixed."""
    step: float
    """Change of the weight per training step."""
    maximum: float
    """Upper bound on the weight, so that a target that is never reached cannot raise it forever."""
    is_active: bool = True
    """False if the last step's entropy was above the target."""

    @property
    def applied_coef(self) -> float:
        """Weight of the bonus in the next step's loss."""
        return self.coef if self.is_active else 0.0

    def adapt(self, *, entropy: float) -> "EntropyController":
        """Return the controller for the next step: weight up if entropy < target, else down.

        The weight stays between 0 and ``maximum``. It is applied only if entropy <= target.

        Args:
            entropy: Mean over the step's trained tokens, in nats.

        Source: He et al. 2025, arXiv:2505.22312, adaptive entropy control, as also implemented in
        TRL; the upper bound is taken from TRL.
        """
        if self.target is None:
            return self
        moved = self.coef + self.step if entropy < self.target else self.coef - self.step
        # The coefficient stays at or above 0: a negative bonus would lower the entropy even more.
        return replace(
            self, coef=min(max(0.0, moved), self.maximum), is_active=entropy <= self.target
        )


def build_entropy_controller(config: AlgorithmConfig) -> EntropyController:
    """Return the controller at the start of a run; fixed without algorithm.entropy_controller."""
    controller = config.entropy_controller
    return EntropyController(
        coef=config.entropy_coef,
        target=None if controller is None else controller.target,
        step=0.0 if controller is None else controller.coef_step,
        maximum=config.entropy_coef if controller is None else controller.coef_max,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KlController:
    """Adapt the weight of the KL penalty; its fields are saved in checkpoints."""

    coef: float
    """Current weight of the KL in the reward, above 0 if a target is set."""
    target: float | None
    """Desired KL per completion, in nats; None keeps the weight fixed."""
    horizon: int
    """Completions over which a lasting error of 20 % or more scales the weight by about e^0.2."""

    def adapt(self, *, kl: float, num_samples: int) -> "KlController":
        """Return the controller for the next step.

            coef' = coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

        Args:
            kl: Mean over the step's completions of the KL summed over trained tokens, in nats.
            num_samples: Completions of the step.

        Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
        """
        # The update of a step with a non-finite KL is skipped. Adapting to it would make the weight
        # NaN until the run ends.
        if self.target is None or not math.isfinite(kl):
            return self
        # Bounded, because the KL of a single step is noisy.
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_samples / self.horizon))


def build_kl_controller(config: AlgorithmConfig) -> KlController:
    """Return the initial controller; without algorithm.kl_controller its coefficient is fixed."""
    controller = config.kl_controller
    return KlController(
        coef=config.kl_reward_coef,
        target=None if controller is None else controller.target,
        horizon=1 if controller is None else controller.horizon_completions,
    )
