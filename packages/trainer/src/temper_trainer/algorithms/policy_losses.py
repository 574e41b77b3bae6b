"""The built-in policy losses: PPO, GSPO, CISPO, GMPO and SAPO."""

from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric, weighted_mean
from temper_engine_api.objective import register_objective
from temper_trainer.algorithms.surrogate import (
    SurrogateObjective,
    compute_clip_fractions,
    compute_sequence_mean,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedObjective(SurrogateObjective):
    """A surrogate with the ratio held to [1 - clip_low, 1 + clip_high]; what shares the fields and metrics of PPO's clip."""

    clip_low: float = 0.2
    """rho is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """rho is clipped above at 1 + clip_high."""

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """-min(rho * A, clip(rho) * A)."""
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Of both sides."""
        ratio = log_ratio.exp()
        is_low, is_high = ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high
        return compute_clip_fractions(
            is_low=is_low, is_high=is_high, advantages=advantages, mask=batch.loss_mask
        )


@register_objective("ppo")
@dataclass(frozen=True, slots=True, kw_only=True)
class PpoObjective(ClippedObjective):
    """Clipped surrogate per trained token.

    With rho = exp(log p - log p_old) and advantage A:

        loss = -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A), and where A < 0 at most -dual_clip * A,
        less entropy_coef * H, plus kl_coef * KL(policy, reference).

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7; asymmetric clip: Yu et al. 2025, arXiv:2503.14476, section 3.1; dual clip:
    Ye et al. 2020, arXiv:1912.09729, section 3.
    """

    dual_clip: float | None = None
    """Above 1; bounds the loss of a negative advantage, which is otherwise unbounded in rho. None is off."""

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Clipped, and bounded where the advantage is negative."""
        loss = ClippedObjective.surrogate(
            self, log_ratio, logprobs=logprobs, advantages=advantages, batch=batch
        )
        if self.dual_clip is None:
            return loss
        return torch.where(advantages < 0, torch.minimum(loss, -self.dual_clip * advantages), loss)

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Of both sides, and of the dual clip where there is one."""
        found = ClippedObjective.clip_metrics(self, log_ratio, advantages=advantages, batch=batch)
        if self.dual_clip is not None:
            found["policy/dual_clip_fraction"] = weighted_mean(
                (log_ratio.exp() > self.dual_clip) & (advantages < 0), batch.loss_mask
            )
        return found


@register_objective("gspo")
@dataclass(frozen=True, slots=True, kw_only=True)
class GspoObjective(ClippedObjective):
    """PPO's clip on the geometric mean of a completion's ratios.

    s = exp(mean over the completion of (log p - log p_old)); each token has s_t = sg(s) * p / sg(p), so that advantages may differ within
    a completion; loss_t = -min(s_t * A_t, clip(s_t, 1 - clip_low, 1 + clip_high) * A_t). With sequence_mean_token_mean and equal
    advantages this is the published sequence-level loss and its gradient. Clips are small here: 3e-4 and 4e-4 in the paper.

    Source: Zheng et al. 2025, arXiv:2507.18071, equations 5, 7, 13 and 14 (GSPO-token).
    """

    def effective_log_ratio(self, log_ratio: Tensor, batch: SequenceBatch) -> Tensor:
        """The completion's mean as a number, each token's own gradient."""
        return compute_sequence_mean(log_ratio, batch).detach() + (log_ratio - log_ratio.detach())


@register_objective("cispo")
@dataclass(frozen=True, slots=True, kw_only=True)
class CispoObjective(ClippedObjective):
    """REINFORCE with a clipped importance weight: every token keeps a gradient, also those that PPO's clip would silence.

    loss = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) * A * log p. With clip_low = 1 only the upper side is clipped, as in the paper.

    Source: MiniMax 2025, arXiv:2506.13585, equations 4 and 5.
    """

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """-sg(clip(rho)) * A * log p."""
        weight = log_ratio.detach().exp().clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -weight * advantages * logprobs


@register_objective("gmpo")
@dataclass(frozen=True, slots=True, kw_only=True)
class GmpoObjective(SurrogateObjective):
    """One outlying token moves a geometric mean little.

    loss = -A * exp(mean over the completion of c_t), with c_t = min(log rho, clip(log rho, -clip_low, clip_high)) where A > 0 and the max
    of both where A < 0; it stands on every token of the completion, so that sequence_mean_token_mean gives the published loss. The clip
    is of the log-ratio: 0.4 on both sides in the paper.

    Source: Zhao et al. 2025, arXiv:2507.20673, equation 4.
    """

    clip_low: float = 0.4
    """log rho is clipped below at -clip_low."""
    clip_high: float = 0.4
    """log rho is clipped above at clip_high."""

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """-A * exp(mean of the clipped log-ratios)."""
        clipped = log_ratio.clamp(-self.clip_low, self.clip_high)
        held = torch.where(
            advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped)
        )
        return -advantages * compute_sequence_mean(held, batch).exp()

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Of both sides."""
        is_low, is_high = log_ratio < -self.clip_low, log_ratio > self.clip_high
        return compute_clip_fractions(
            is_low=is_low, is_high=is_high, advantages=advantages, mask=batch.loss_mask
        )


@register_objective("sapo")
@dataclass(frozen=True, slots=True, kw_only=True)
class SapoObjective(SurrogateObjective):
    """Tokens fade out the further the ratio is from 1, without an edge.

    loss = -(4 / tau) * sigmoid(tau * (rho - 1)) * A, with tau for positive and for other advantages. At rho = 1 the gradient is that of
    -rho * A, whatever tau.

    Source: Gao et al. 2025, arXiv:2511.20347, section 3.
    """

    positive_temperature: float = 1.0
    """tau where A > 0."""
    negative_temperature: float = 1.05
    """tau elsewhere; larger than the other in the paper, since negative advantages push up many unseen tokens."""

    def __post_init__(self) -> None:
        SurrogateObjective.__post_init__(self)
        if min(self.positive_temperature, self.negative_temperature) <= 0:
            raise ConfigError(
                f"both temperatures of sapo must be above 0, but are {self.positive_temperature}, {self.negative_temperature}."
            )

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """The soft gate times the advantage."""
        tau = torch.where(advantages > 0, self.positive_temperature, self.negative_temperature)
        return -(4.0 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * advantages
