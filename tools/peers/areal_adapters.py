"""AReaL's losses, computed by our algorithms; see areal.utils.functional."""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from temper_engine_api.objective import HeadOutput
from temper_trainer.algorithms.kl import MAX_LOG_RATIO
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Gspo, Ppo, Sapo
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from tools.peers.padded import (
    NoCounterpartError,
    build_batch,
    compute_loss,
    compute_token_losses,
    flatten,
    unflatten,
)


def ppo_actor_loss_fn(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    loss_mask: Tensor,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    rejection_sampling: object = None,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's or GSPO's loss, and columns about the ratio."""
    if rejection_sampling is not None:
        raise NoCounterpartError("rejection inside the loss")
    if importance_sampling_level not in ("token", "sequence"):
        raise NoCounterpartError("AReaL's message about a wrong level")
    is_sequence = importance_sampling_level == "sequence"
    if is_sequence and logprobs.ndim == 1 and cu_seqlens is None:
        raise NoCounterpartError("AReaL's message about a missing cu_seqlens")
    cu_seqlens = _complete_lengths(logprobs, cu_seqlens)
    variant = Gspo if is_sequence else Ppo
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    loss = variant(clip_low=eps_clip, clip_high=high, dual_clip=c_clip)
    tensors = (logprobs, proximal_logprobs, advantages, loss_mask)
    reduced, columns = _compute(
        loss, tensors, averages_advantages=is_sequence, cu_seqlens=cu_seqlens
    )
    ratio, signs = columns["importance_weight"], columns.pop("advantages")
    is_outside = ((ratio > 1 + high) & (signs > 0)) | ((ratio < 1 - eps_clip) & (signs < 0))
    columns["clip_mask"] = is_outside & loss_mask.bool()
    columns["dual_clip_mask"] = torch.zeros_like(columns["clip_mask"])
    if c_clip is not None:
        columns["dual_clip_mask"] = (ratio > c_clip) & (signs < 0) & loss_mask.bool()
    return reduced, columns


def sapo_loss_fn(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    tau_pos: float,
    tau_neg: float,
    loss_mask: Tensor,
    importance_sampling_level: str = "token",
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return SAPO's loss, and columns about the ratio and the gates."""
    if importance_sampling_level != "token":
        raise NoCounterpartError("SAPO on the ratio of a completion")
    if tau_pos <= 0 or tau_neg <= 0:
        raise NoCounterpartError("AReaL's message about a wrong temperature")
    cu_seqlens = _complete_lengths(logprobs, cu_seqlens)
    loss = Sapo(positive_temperature=tau_pos, negative_temperature=tau_neg)
    tensors = (logprobs, old_logprobs, advantages, loss_mask)
    reduced, columns = _compute(loss, tensors, averages_advantages=False, cu_seqlens=cu_seqlens)
    signs = columns.pop("advantages")
    for name, gate, sign in (("pos", tau_pos, 1.0), ("neg", tau_neg, -1.0)):
        # With an advantage of 1 or -1, the loss is the gate up to the sign.
        losses, _ = _compute_losses(
            Sapo(positive_temperature=gate, negative_temperature=gate),
            (logprobs, old_logprobs, torch.full_like(advantages, sign), loss_mask),
            averages_advantages=False,
            cu_seqlens=cu_seqlens,
        )
        columns[f"sapo_scaled_gate_{name}"] = (losses * -sign).detach()
    columns["sapo_soft_gate"] = torch.where(
        signs > 0, columns["sapo_scaled_gate_pos"], columns["sapo_scaled_gate_neg"]
    )
    columns["clip_mask"] = columns["dual_clip_mask"] = torch.zeros_like(loss_mask, dtype=torch.bool)
    return reduced, columns


def _compute(
    loss: PolicyLoss,
    tensors: tuple[Tensor, ...],
    *,
    averages_advantages: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the reduced loss, and the columns of the tokens in the shape of the input."""
    padded = [_pad(each, cu_seqlens) for each in tensors]
    logprobs, old, advantages, mask = padded
    if averages_advantages:
        advantages = _average(advantages, mask)
    reduced = compute_loss(
        PolicyObjective(loss=loss),
        mask=mask,
        output=(HeadOutput.LOGPROB, logprobs),
        columns={"advantages": advantages, "old_logprobs": old},
    )
    losses, ratio = _compute_losses(
        loss, tensors, averages_advantages=averages_advantages, cu_seqlens=cu_seqlens
    )
    return reduced, {
        "loss": losses.detach(),
        "importance_weight": ratio,
        "approx_kl": (tensors[0] - tensors[1]).detach(),
        "advantages": _unpad(advantages, cu_seqlens),
    }


def _compute_losses(
    loss: PolicyLoss,
    tensors: tuple[Tensor, ...],
    *,
    averages_advantages: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the losses and the ratio of each token."""
    logprobs, old, advantages, mask = (_pad(each, cu_seqlens) for each in tensors)
    if averages_advantages:
        advantages = _average(advantages, mask)
    losses = compute_token_losses(
        PolicyObjective(loss=loss),
        mask=mask,
        output=(HeadOutput.LOGPROB, logprobs),
        columns={"advantages": advantages, "old_logprobs": old},
    )
    batch = build_batch(mask)
    log_ratio = torch.where(batch.loss_mask, flatten((logprobs - old).detach()), 0.0)
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    effective = loss.compute_effective_log_ratio(clamped, batch)
    ratio = torch.where(batch.loss_mask, effective.exp(), 0.0)
    return _unpad(losses, cu_seqlens), _unpad(unflatten(ratio, mask), cu_seqlens)


def _average(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each row's trained tokens, as AReaL's GSPO takes it."""
    weights = mask.float()
    mean: Tensor = (advantages * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
    return mean[:, None].expand_as(advantages)


def _complete_lengths(column: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    """Return the borders of packed sequences; tokens without borders are one sequence."""
    if column.ndim == 2 or cu_seqlens is not None:
        return cu_seqlens
    return torch.tensor([0, len(column)])


def _pad(column: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        return column
    return pad_sequence(list(column.split(cu_seqlens.diff().tolist())), batch_first=True)


def _unpad(column: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:
        return column
    lengths = cu_seqlens.diff().tolist()
    return torch.cat([row[:length] for row, length in zip(column, lengths, strict=True)])
