"""Comparisons of policy losses, estimators and losses of pairs with verl, slime and OpenRLHF."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from temper_engine_api.objective import Aggregation, AggregationMode, HeadOutput
from temper_trainer.algorithms.advantages.estimators.group_estimators import (
    compute_opo_advantages,
    compute_remax_advantages,
)
from temper_trainer.algorithms.advantages.estimators.optimal_token_baseline import (
    compute_optimal_token_baseline_advantages,
    estimate_token_energies,
)
from temper_trainer.algorithms.advantages.estimators.pass_rate_estimators import (
    compute_passk_advantages,
)
from temper_trainer.algorithms.distillation_losses.top_k_losses import ForwardKl
from temper_trainer.algorithms.kl import estimate_kl_loss
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.objectives.supervised_losses import RewardModelObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Cispo, Gmpo, Gspo, Ppo, Sapo
from temper_trainer.algorithms.policy_losses.covariance_losses import ClipCov, KlCov
from temper_trainer.algorithms.policy_losses.divergence_losses import Dppo
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.algorithms.policy_losses.sequence_mask_loss import Opsm
from temper_trainer.algorithms.preference_losses.reference_losses import Dpo, Ipo, LogRatioLoss
from tools.peers.padded import build_batch, compute_loss, compute_token_losses, unflatten
from tools.peers.preference_rows import (
    compute_preference_loss,
    compute_reward_loss,
    select_preferences,
)
from tools.peers.random_data import Data, Pair, Row
from tools.peers.verl_adapters import number_groups

_VERL, _SLIME, _OPENRLHF = (
    "verl.trainer.ppo.core_algos",
    "slime.utils.ppo_utils",
    "openrlhf.models.loss",
)
_VERL_DISTILLATION = "verl.trainer.distillation.fsdp.losses"
_SEQUENCE_MEAN = Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN)


def _compare_with_verl(
    loss: PolicyLoss,
    name: str,
    *,
    aggregates_rows: bool = False,
    has_row_advantages: bool = False,
    is_on_policy: bool = False,
    settings: Mapping[str, object] | None = None,
    selection: Mapping[str, float] | None = None,
) -> Callable[[Any, Data], Pair]:
    """Compare a policy loss with verl's function ``compute_policy_loss_NAME``.

    Args:
        loss: Our loss with its settings.
        name: End of the name of verl's function.
        aggregates_rows: True for the mean over rows of means over tokens, which verl's function
            may always take; False for the mean over tokens.
        has_row_advantages: One advantage per row in place of one per token.
        is_on_policy: Old log-probs equal to the current ones. verl selects tokens by the current
            log-probs, and we by the old ones.
        settings: Settings of verl's actor.
        selection: Settings of verl's policy_loss.
    """

    def compute(module: Any, data: Data) -> Pair:
        config = importlib.import_module("verl.workers.config.actor")
        actor = config.ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            **(settings or {}),
            policy_loss=config.PolicyLossConfig(**(selection or {})),
        )
        # Log-probs of at most 0: some of the losses compute probabilities.
        logprobs = nn.functional.logsigmoid(data.logprobs)
        old = logprobs.detach() if is_on_policy else nn.functional.logsigmoid(data.old)
        advantages = data.advantages
        if has_row_advantages:
            advantages = advantages[:, :1].expand_as(advantages)
        local = compute_loss(
            PolicyObjective(
                loss=loss, aggregation=_SEQUENCE_MEAN if aggregates_rows else Aggregation()
            ),
            mask=data.mask,
            output=(HeadOutput.LOGPROB, logprobs),
            columns={"advantages": advantages, "old_logprobs": old},
        )
        remote, _ = getattr(module, f"compute_policy_loss_{name}")(
            old_log_prob=old,
            log_prob=logprobs,
            advantages=advantages,
            response_mask=data.mask,
            loss_agg_mode="token-mean",
            config=actor,
        )
        if name == "geo_mean":
            # verl's mean also counts rows without a token, whose loss is 0.
            remote = remote * len(data.mask) / (data.mask.sum(dim=1) > 0).sum()
        return local, remote

    return compute


def _spread(advantages: Tensor, data: Data) -> Tensor:
    return advantages.float()[:, None] * data.mask


def _compare_opo(module: Any, data: Data) -> Pair:
    rewards, groups = data.token_rewards, np.array(data.groups)
    local = compute_opo_advantages(
        rewards.sum(-1), lengths=data.mask.sum(-1), group_ids=number_groups(data.groups)
    )
    remote, _ = module.compute_opo_outcome_advantage(rewards, data.mask, groups)
    return _spread(local, data), remote


def _compare_remax(module: Any, data: Data) -> Pair:
    baselines = data.rewards.flip(0)
    # The reward of the empty row is nowhere.
    local = compute_remax_advantages(data.token_rewards.sum(-1), baselines=baselines)
    remote, _ = module.compute_remax_outcome_advantage(data.token_rewards, baselines, data.mask)
    # verl's return of an untrained token is that of the tokens after it.
    return _spread(local, data), remote * data.mask


def _compare_grpo_passk(module: Any, data: Data) -> Pair:
    rewards, groups = data.token_rewards, np.array(data.groups)
    local = compute_passk_advantages(
        rewards.sum(-1), group_ids=number_groups(data.groups), scale_by_std=True
    )
    remote, _ = module.compute_grpo_passk_outcome_advantage(rewards, data.mask, groups, config={})
    return _spread(local, data), remote


def _compare_optimal_token_baseline(module: Any, data: Data) -> Pair:
    """Compare the baselines for equal energies of tokens; verl has an exact sum for them."""
    # Without holes: verl compares columns, and we the numbers of trained tokens.
    length = data.mask.shape[1]
    filled = (torch.arange(length) < data.mask.sum(-1, keepdim=True)).float()
    given = replace(data, mask=filled)
    logprobs = nn.functional.logsigmoid(data.rollout)
    batch = build_batch(
        filled,
        group_ids=data.groups,
        columns={"rewards": given.token_rewards, "logprobs": logprobs},
    )
    local = compute_optimal_token_baseline_advantages(
        batch.columns["rewards"],
        energies=estimate_token_energies(batch.columns["logprobs"]),
        samples=batch,
    )
    remote, _ = module.compute_optimal_token_baseline_advantage(
        given.token_rewards,
        filled,
        np.array(data.groups),
        old_log_probs=logprobs,
        # verl's energy 1 - 2 p + sum_v p_v^2 is then our estimate, 1 - p.
        sum_pi_squared=logprobs.exp(),
    )
    return unflatten(local, filled), remote


def _compare_opsm(module: Any, data: Data) -> Pair:
    """Compare the losses of tokens: ours with OPSM, and ours of PPO times slime's mask."""
    columns = {
        "advantages": data.advantages,
        "old_logprobs": data.old,
        "rollout_logprobs": data.rollout,
    }
    output = (HeadOutput.LOGPROB, data.logprobs)
    local, unmasked = (
        compute_token_losses(
            PolicyObjective(loss=loss), mask=data.mask, output=output, columns=columns
        )
        for loss in (Opsm(max_kl=0.05), Ppo())
    )
    mask, _ = module.compute_opsm_mask(
        Namespace(opsm_delta=0.05),
        list(data.logprobs.detach()),
        list(data.rollout),
        list(data.advantages),
        list(data.mask),
    )
    return local * data.mask, unmasked * mask.view_as(data.mask) * data.mask


def _compare_unbiased_kl(module: Any, data: Data) -> Pair:
    log_ratio = data.logprobs - data.old
    local = estimate_kl_loss(
        data.logprobs, ref_logprobs=data.ref, log_ratio=log_ratio, estimator="k3_ratio"
    )
    remote = module.compute_approx_kl(
        data.logprobs, data.ref, "k3", importance_ratio=log_ratio.exp()
    )
    return local, remote


def _compare_pairs(loss: LogRatioLoss, *, uses_means: bool = False) -> Callable[[Any, Data], Pair]:
    """Compare a loss of pairs with OpenRLHF's, of sums or means over completions."""

    def compute(module: Any, data: Data) -> Pair:
        selected, is_chosen = select_preferences(data)
        counts = selected.mask.sum(-1) if uses_means else 1.0
        policy, reference = (
            (each * selected.mask).sum(-1) / counts
            for each in (nn.functional.logsigmoid(selected.logprobs), selected.ref)
        )
        remote, *_ = module.DPOLoss(
            loss.beta,
            label_smoothing=getattr(loss, "label_smoothing", 0.0),
            ipo=isinstance(loss, Ipo),
        )(*(each[part] for each in (policy, reference) for part in (is_chosen, ~is_chosen)))
        return compute_preference_loss(loss, data=selected, is_chosen=is_chosen), remote

    return compute


def _compare_reward_model(module: Any, data: Data) -> Pair:
    """Compare the loss of a reward model; the score of a row is the sum of its log-probs."""
    selected, is_chosen = select_preferences(data)
    scores = (selected.logprobs * selected.mask).sum(-1)
    margin = selected.rewards[: len(scores)]
    objective = RewardModelObjective(has_margin=True)
    local = compute_reward_loss(scores, is_chosen, objective, margin=margin)
    remote = module.PairWiseLoss()(scores[is_chosen], scores[~is_chosen], margin[is_chosen])
    return local, remote


def _compare_forward_kl(module: Any, data: Data) -> Pair:
    """Compare the forward KL over the teacher's top-k tokens, which verl takes without the rest."""
    # A vocabulary of the row's length: its tokens are the columns of the data.
    policy, teacher = data.logprobs.log_softmax(-1), data.ref.log_softmax(-1)
    top, ids = teacher.topk(4, dim=-1)
    policy = policy.gather(-1, ids)
    local = ForwardKl(top_k=4, tail=False).measure(policy, teacher=top)
    return local, module.kl_divergence(log_q=policy, log_p=top)


def list_loss_rows() -> list[Row]:
    """Return the rows of this file."""
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    both = {"clip_low": 0.2, "clip_high": 0.28}
    divergence = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 1.5}
    verl = {
        "gspo": _compare_with_verl(Gspo(**both), "gspo", settings=clip, aggregates_rows=True),
        "cispo": _compare_with_verl(Cispo(**both), "cispo", settings=clip),
        "gmpo": _compare_with_verl(
            Gmpo(**both),
            "geo_mean",
            settings=clip,
            has_row_advantages=True,
            aggregates_rows=True,
        ),
        "sapo": _compare_with_verl(
            Sapo(positive_temperature=1.1, negative_temperature=1.3),
            "sapo",
            settings={"tau_pos": 1.1, "tau_neg": 1.3},
            aggregates_rows=True,
        ),
        **{
            f"dppo {kind}": _compare_with_verl(
                Dppo(divergence=kind, clip_low=0.05, clip_high=0.08, max_ratio=1.5),
                f"dppo_{kind}",
                settings=divergence,
            )
            for kind in ("tv", "kl")
        },
        # All candidates, because the choice among them is random.
        "clip_cov, on-policy": _compare_with_verl(
            ClipCov(**both, fraction=1.0, min_covariance=0.1, max_covariance=1.0),
            "clip_cov",
            is_on_policy=True,
            settings=clip,
            selection={"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.0},
        ),
        "kl_cov, on-policy": _compare_with_verl(
            KlCov(fraction=0.2, kl_cov_coef=0.7),
            "kl_cov",
            is_on_policy=True,
            selection={"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
        ),
        "opo": _compare_opo,
        "remax": _compare_remax,
        "grpo_passk": _compare_grpo_passk,
        "optimal_token_baseline": _compare_optimal_token_baseline,
    }
    slime = {"opsm": _compare_opsm, "k3_ratio": _compare_unbiased_kl}
    openrlhf = {
        "dpo": _compare_pairs(Dpo(beta=0.3)),
        "dpo with label smoothing": _compare_pairs(Dpo(beta=0.3, label_smoothing=0.2)),
        "ipo": _compare_pairs(Ipo(beta=0.3), uses_means=True),
        "reward model with margin": _compare_reward_model,
    }
    return [
        *(("verl", _VERL, name, compute) for name, compute in verl.items()),
        ("verl", _VERL_DISTILLATION, "forward_kl without tail", _compare_forward_kl),
        *(("slime", _SLIME, name, compute) for name, compute in slime.items()),
        *(("openrlhf", _OPENRLHF, name, compute) for name, compute in openrlhf.items()),
    ]
