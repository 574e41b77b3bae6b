"""Comparisons with the loss of TRL's GRPOTrainer, and with that of its RewardTrainer.

The methods get an object with the settings that they read, as in ``trl_comparisons``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from temper_engine_api.objective import Aggregation, AggregationMode, HeadOutput
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Cispo, Gspo, Ppo, Sapo
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.algorithms.policy_losses.sequence_mask_loss import Opsm
from tools.peers.padded import compute_loss
from tools.peers.random_data import Data, Pair, Row

_ACCELERATOR = SimpleNamespace(
    device="cpu",
    num_processes=1,
    gather=lambda tensor: tensor,
    gather_for_metrics=lambda tensor: tensor,
    reduce=lambda tensor, reduction: tensor,
)
"""Stands for accelerate's, of one process."""
_MODEL = SimpleNamespace(training=True)


def _select_rows(data: Data) -> Data:
    """Return the rows with trained tokens: TRL's mean over rows also counts the others."""
    names = ("logprobs", "old", "rollout", "ref", "advantages", "mask")
    return replace(data, **{name: getattr(data, name)[:-1] for name in names})


def _compare_grpo(
    loss: PolicyLoss,
    mode: AggregationMode,
    *,
    loss_type: str,
    is_sequence_ratio: bool = False,
    clip: tuple[float, float] = (0.2, 0.28),
    kl_coef: float = 0.0,
    corrects_kl: bool = False,
    is_on_rollout: bool = False,
    settings: Mapping[str, float] | None = None,
) -> Callable[[Any, Data], Pair]:
    """Compare a policy loss and its aggregation with ``GRPOTrainer._compute_loss``.

    Args:
        loss: Our loss with its settings.
        mode: Our aggregation.
        loss_type: TRL's name for both.
        is_sequence_ratio: True for TRL's importance_sampling_level sequence.
        clip: TRL's epsilon and epsilon_high.
        kl_coef: Weight of the KL to the reference.
        corrects_kl: True to multiply the KL by the ratio.
        is_on_rollout: True to give TRL the log-probs of the sampler.
        settings: More settings of TRL's configuration or of its trainer.
    """

    def compute(module: Any, given: Data) -> Pair:
        data = _select_rows(given)
        advantages = data.advantages[:, :1]
        length = data.mask.shape[1]
        trainer = _make_trainer(
            data.logprobs,
            clip=clip,
            beta=kl_coef,
            loss_type=loss_type,
            importance_sampling_level="sequence" if is_sequence_ratio else "token",
            max_completion_length=length,
            corrects_kl=corrects_kl,
            settings=settings or {},
            module=module,
        )
        inputs = {
            "prompt_ids": torch.zeros(len(data.mask), 1, dtype=torch.int64),
            "prompt_mask": torch.ones(len(data.mask), 1),
            "completion_ids": torch.zeros_like(data.mask, dtype=torch.int64),
            "completion_mask": data.mask,
            "advantages": advantages.squeeze(1),
            "old_per_token_logps": data.old,
            "ref_per_token_logps": data.ref,
            "num_items_in_batch": data.mask.sum(),
        }
        if is_on_rollout:
            inputs["sampling_per_token_logps"] = data.rollout
        objective = PolicyObjective(
            loss=loss,
            kl_coef=kl_coef,
            kl_estimator="k3_ratio" if corrects_kl else "k3",
            aggregation=Aggregation(
                mode=mode,
                horizon=length if mode is AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM else None,
            ),
        )
        columns = {
            "advantages": advantages.expand_as(data.mask),
            "old_logprobs": data.old,
            "rollout_logprobs": data.rollout,
            "ref_logprobs": data.ref,
        }
        local = compute_loss(
            objective,
            mask=data.mask,
            output=(HeadOutput.LOGPROB, data.logprobs),
            columns=columns,
        )
        return local, module.grpo_loss(trainer, _MODEL, inputs)

    return compute


def _make_trainer(
    logprobs: Tensor,
    *,
    clip: tuple[float, float],
    corrects_kl: bool,
    settings: Mapping[str, float],
    module: Any,
    **attributes: object,
) -> SimpleNamespace:
    """Return what stands for TRL's trainer; its model gives these log-probs."""
    names = ("delta", "sapo_temperature_pos", "sapo_temperature_neg")
    return SimpleNamespace(
        args=SimpleNamespace(
            use_bias_correction_kl=corrects_kl, **{name: settings.get(name) for name in names}
        ),
        model=_MODEL,
        accelerator=_ACCELERATOR,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        get_off_policy_mask=module.get_off_policy_mask,
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
        **attributes,
    )


def list_trl_policy_rows() -> list[Row]:
    """Return the rows of the losses of GRPOTrainer."""
    both = {"clip_low": 0.2, "clip_high": 0.28}
    row_mean = AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN
    token_mean = AggregationMode.TOKEN_MEAN
    row_sum = AggregationMode.SEQUENCE_MEAN_TOKEN_SUM
    norm = AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM
    gates = {"sapo_temperature_pos": 1.1, "sapo_temperature_neg": 1.3}
    gspo = Gspo(clip_low=0.03, clip_high=0.04)
    rows: dict[str, Callable[[Any, Data], Pair]] = {
        "grpo": _compare_grpo(Ppo(**both), row_mean, loss_type="grpo"),
        "bnpo": _compare_grpo(Ppo(**both), token_mean, loss_type="bnpo"),
        "dr_grpo": _compare_grpo(Ppo(**both), norm, loss_type="dr_grpo"),
        "dapo": _compare_grpo(Ppo(**both), token_mean, loss_type="dapo"),
        "dapo with delta": _compare_grpo(
            Ppo(**both, dual_clip=1.5), token_mean, loss_type="dapo", settings={"delta": 1.5}
        ),
        "grpo with beta": _compare_grpo(Ppo(**both), row_mean, loss_type="grpo", kl_coef=0.1),
        "grpo with a corrected KL": _compare_grpo(
            Ppo(**both), row_mean, loss_type="grpo", kl_coef=0.3, corrects_kl=True
        ),
        "gspo": _compare_grpo(
            gspo, row_mean, loss_type="grpo", is_sequence_ratio=True, clip=(0.03, 0.04)
        ),
        "luspo": _compare_grpo(
            gspo, row_sum, loss_type="luspo", is_sequence_ratio=True, clip=(0.03, 0.04)
        ),
        "cispo": _compare_grpo(
            Cispo(clip_high=0.28), token_mean, loss_type="cispo", clip=(0.2, 1.28)
        ),
        "sapo": _compare_grpo(
            Sapo(positive_temperature=1.1, negative_temperature=1.3),
            row_mean,
            loss_type="sapo",
            settings=gates,
        ),
        "opsm": _compare_grpo(
            Opsm(**both, max_kl=0.05),
            row_mean,
            loss_type="grpo",
            is_on_rollout=True,
            settings={"off_policy_mask_threshold": 0.05},
        ),
    }
    return [("trl", "trl", f"GRPOTrainer: {name}", compute) for name, compute in rows.items()]
