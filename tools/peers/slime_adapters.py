"""slime's losses per token, computed by our algorithms; see slime.utils.ppo_utils."""

import torch
from torch import Tensor

from temper_engine_api.objective import HeadOutput
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Cispo, Ppo
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from tools.peers.padded import compute_token_losses


def _compute(loss: PolicyLoss, *, logprobs: Tensor, ppo_kl: Tensor, advantages: Tensor) -> Tensor:
    """Return the losses [T] of log-probs whose old ones are logprobs + ppo_kl."""
    return compute_token_losses(
        PolicyObjective(loss=loss),
        mask=torch.ones(1, len(logprobs)),
        output=(HeadOutput.LOGPROB, logprobs[None]),
        columns={
            "advantages": advantages[None],
            "old_logprobs": (logprobs.detach() + ppo_kl.detach())[None],
        },
    )[0]


def compute_policy_loss(
    ppo_kl: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, None]:
    """Return PPO's losses; the clip fraction is a metric here."""
    loss = Ppo(clip_low=eps_clip, clip_high=eps_clip_high, dual_clip=eps_clip_c)
    # slime gives log p_old - log p with the gradient of log p.
    logprobs = -ppo_kl
    losses = _compute(
        loss,
        logprobs=logprobs,
        ppo_kl=-logprobs.detach(),
        advantages=advantages,
    )
    return losses, None


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return CISPO's losses, and which ratios are clipped."""
    loss = Cispo(clip_low=eps_clip, clip_high=eps_clip_high)
    losses = _compute(loss, logprobs=log_probs, ppo_kl=ppo_kl, advantages=advantages)
    ratio = (-ppo_kl.detach()).exp()
    is_clipped = (ratio < 1 - eps_clip) | (ratio > 1 + eps_clip_high)
    return losses, is_clipped.float()
