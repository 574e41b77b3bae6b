"""Divergences over the teacher's most likely tokens."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated

from temper_trainer.algorithms.distillation_losses.distillation_loss import DistillationLoss
from temper_trainer.settings.lazy_torch import torch
from temper_trainer.settings.ranges import PositiveInt, Range
from temper_trainer.settings.variants import settings, variant

if TYPE_CHECKING:
    from torch import Tensor

_MAX_MASS = 1.0 - 1e-6
"""Bound on the summed probability of the top-k tokens, so that log(1 - mass) stays finite."""


@settings
class TopKLoss(DistillationLoss):
    """Sum of a divergence's terms over the teacher's top-k tokens, and over the rest as one token.

    The rest has the probability 1 - (sum over the top-k tokens). Adding up probabilities in this
    way never makes the divergence larger than across all tokens, and it is 0 where the models
    agree.
    """

    top_k: PositiveInt = 64
    """Number of most likely tokens that a teacher returns per position."""

    @property
    def num_teacher_tokens(self) -> int:
        return self.top_k

    @property
    def counts_tail(self) -> bool:
        """True if all tokens outside the top-k count as one more token."""
        return True

    @abstractmethod
    def compute_terms(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        """Return the divergence terms, in the shape of the log-probs."""

    def measure(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        """Return the divergences [T] from log-probs [T, K]."""
        is_given = teacher.isfinite()
        # Mask before any arithmetic: with where() afterwards the gradient would be 0 * NaN = NaN.
        policy, teacher = torch.where(is_given, policy, 0.0), torch.where(is_given, teacher, 0.0)
        total = torch.where(is_given, self.compute_terms(policy, teacher=teacher), 0.0).sum(-1)
        if not self.counts_tail:
            return total
        rest_policy, rest_teacher = (
            torch.log1p(-torch.where(is_given, logs.exp(), 0.0).sum(-1).clamp(max=_MAX_MASS))
            for logs in (policy, teacher)
        )
        return total + self.compute_terms(rest_policy, teacher=rest_teacher)


@variant("forward_kl")
class ForwardKl(TopKLoss):
    """Forward KL(teacher, policy) over the teacher's top-k tokens.

        loss = sum over v of q(v) * (log q(v) - log p(v))

    q is the teacher, p the policy.

    Source: Hinton et al. 2015, arXiv:1503.02531.
    """

    tail: bool = True
    """Count the probability outside the top_k as one more token."""

    @property
    def counts_tail(self) -> bool:
        return self.tail

    def compute_terms(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        """Return q * (log q - log p)."""
        return teacher.exp() * (teacher - policy)


@variant("top_k_reverse_kl")
class TopKReverseKl(TopKLoss):
    """Reverse KL(policy, teacher) over the teacher's top-k tokens and the rest.

        loss = sum over v of p(v) * (log p(v) - log q(v)) + r_p * (log r_p - log r_q)

    p is the policy, q the teacher, and r = 1 - (sum over the top-k tokens) the rest. In contrast to
    ``reverse_kl`` the loss does not depend on the sampled token. Its gradient therefore has less
    variance, and completions need not be samples of the policy.

    The rest always counts. Without the rest, the minimum of the loss would be at p = q/e, where sum
    p log(p/q) is smallest: the top-k tokens would get only 1/e of the teacher's probability.

    Source: arXiv:2608.14728 (the rest as one token); Gu et al. 2023, arXiv:2306.08543 (reverse KL
    for language models).
    """

    def compute_terms(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        """Return p * (log p - log q)."""
        return policy.exp() * (policy - teacher)


@variant("jensen_shannon")
class JensenShannon(TopKLoss):
    """Jensen-Shannon divergence over the teacher's top-k tokens.

        loss = m * KL(q, M) + (1 - m) * KL(p, M),  M = m * q + (1 - m) * p

    q is the teacher, p the policy and m the ``mixture``.

    Source: Agarwal et al. 2023, arXiv:2306.13649, equation 1.
    """

    tail: bool = True
    """Count the probability outside the top_k as one more token."""
    mixture: Annotated[float, Range(above=0, below=1)] = 0.5
    """Weight of the teacher in the mixture."""

    @property
    def counts_tail(self) -> bool:
        return self.tail

    def compute_terms(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        """Return m * q * (log q - log M) + (1 - m) * p * (log p - log M)."""
        p, q, m = policy.exp(), teacher.exp(), self.mixture
        # log(m * q + (1 - m) * p) would be -inf where both probabilities are 0 in float32.
        log_mixture = torch.logaddexp(teacher + math.log(m), policy + math.log1p(-m))
        return m * q * (teacher - log_mixture) + (1.0 - m) * p * (policy - log_mixture)
