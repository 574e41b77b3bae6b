"""Reverse KL, estimated from the tokens that the policy sampled: as a loss, or as a reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from temper_trainer.algorithms.distillation_losses.distillation_loss import DistillationLoss
from temper_trainer.settings.lazy_torch import lazy_module
from temper_trainer.settings.variants import variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_trainer.algorithms import kl as formulas
else:
    formulas = lazy_module("temper_trainer.algorithms.kl")


@variant("reverse_kl")
class ReverseKl(DistillationLoss):
    """Reverse KL(policy, teacher), estimated from the tokens that the policy sampled.

        loss = k(log p, log q)

    k is Schulman's k2 or k3, p the policy and q the teacher. k2 has the expected gradient of
    KL(policy, teacher), which is mode-seeking.

    Source: Agarwal et al. 2023, arXiv:2306.13649, section 3; Gu et al. 2023, arXiv:2306.08543;
    estimators as in ``kl.estimate_kl``.
    """

    # k1 is not an alternative, because its expected gradient is zero.
    kl_estimator: Literal["k2", "k3"] = "k2"
    """Schulman's estimator of the KL divergence; k1 has zero expected gradient."""

    def measure(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        """Return the estimates [T] at the sampled tokens."""
        return formulas.estimate_kl(policy, ref_logprobs=teacher, estimator=self.kl_estimator)


@variant("reverse_kl_reward")
class ReverseKlReward(DistillationLoss):
    """Negative reverse KL at the sampled token as a reward of that token alone.

        reward = -k(log p_old, log q)

    With k1 it is log q - log p_old: if each token is credited with only its own reward, the policy
    gradient equals KL(policy, teacher)'s. Any policy loss can be used.

    Source: Lu 2025, "On-Policy Distillation", Thinking Machines Lab.
    """

    is_reward: ClassVar[bool] = True

    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimator of the KL divergence."""

    def measure(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        """Return the estimates [T] at the sampled tokens."""
        return formulas.estimate_kl(policy, ref_logprobs=teacher, estimator=self.kl_estimator)
