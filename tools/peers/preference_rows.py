"""Rows of the random data as pairs or labeled completions, and our loss of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.objectives.preference_objective import PreferenceObjective
from temper_trainer.algorithms.objectives.supervised_losses import RewardModelObjective
from temper_trainer.algorithms.preference_losses.preference_loss import PreferenceLoss
from tools.peers.padded import build_batch, flatten
from tools.peers.random_data import Data

NUM_ROWS = 6
"""Rows with trained tokens that preferences use; consecutive ones are pairs."""


def select_preferences(data: Data) -> tuple[Data, Tensor]:
    """Return the rows that preferences use, and True for the first row of each pair."""
    columns = ("logprobs", "ref", "mask")
    selected = replace(data, **{name: getattr(data, name)[:NUM_ROWS] for name in columns})
    return selected, torch.arange(NUM_ROWS) % 2 == 0


def compute_preference_loss(
    loss: PreferenceLoss, *, data: Data, is_chosen: Tensor, kl_baseline: float = 0.0
) -> Tensor:
    """Return our loss of the selected rows."""
    pairs = torch.arange(NUM_ROWS) // (2 if loss.is_paired else 1)
    batch: SequenceBatch = replace(
        build_batch(data.mask, columns={"ref_logprobs": data.ref}),
        group_ids=pairs,
        pack_group_ids=pairs,
        sequence_columns={
            "is_chosen": is_chosen,
            "kl_baseline": torch.full((NUM_ROWS,), kl_baseline),
        },
    )
    objective = PreferenceObjective(loss=loss)
    logprobs = nn.functional.logsigmoid(data.logprobs)
    terms = objective(HeadOutputs(columns={HeadOutput.LOGPROB: flatten(logprobs)}), batch)
    return reduce_loss(
        terms, batch, denominators=count_denominators(batch), aggregation=objective.aggregation
    )


def compute_reward_loss(
    scores: Tensor,
    is_chosen: Tensor,
    objective: RewardModelObjective,
    *,
    margin: Tensor | None = None,
) -> Tensor:
    """Return our loss of a reward model; consecutive scores [B] are pairs."""
    pairs = torch.arange(len(scores)) // 2
    margins = {} if margin is None else {"margin": margin[pairs * 2]}
    batch = replace(
        build_batch(torch.ones(len(scores), 1)),
        group_ids=pairs,
        pack_group_ids=pairs,
        sequence_columns={"is_chosen": is_chosen, **margins},
    )
    return reduce_loss(
        objective(HeadOutputs(columns={HeadOutput.SCORE: scores}), batch),
        batch,
        denominators=count_denominators(batch),
        aggregation=objective.aggregation,
    )
