"""Aggregation by prompt: every prompt of a mini-batch weighs the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import (
    Aggregation,
    AggregationMode,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)

PROMPT_WEIGHTS = "prompt_weights"
"""Name of the [T] float32 column with the weight per trained token."""


@register_objective("prompt_mean")
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMeanObjective(Objective):
    """Average an objective's losses over the tokens of a prompt first, and then over prompts.

        loss = 1 / P * sum over prompts of (1 / tokens of the prompt * sum over its tokens)

    P is the number of prompts with a trained token in the mini-batch. A token's weight is computed
    from the full mini-batch and sent along with it, because the completions of a prompt may be on
    several ranks.

    Source: Khatri et al. 2025, arXiv:2510.13786, section 3.2 (prompt-level averaging).
    """

    objective: Objective
    """Computes the losses of tokens; its aggregation is token_sum."""
    aggregation: Aggregation = field(
        default_factory=lambda: Aggregation(mode=AggregationMode.TOKEN_SUM)
    )

    def __post_init__(self) -> None:
        modes = {self.aggregation.mode, self.objective.aggregation.mode}
        if modes != {AggregationMode.TOKEN_SUM}:
            raise ConfigError(
                "prompt_mean divides by the tokens of each prompt itself, but the aggregation is "
                f"{' and '.join(sorted(modes))}: use token_sum here and in the objective."
            )

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """The outputs that the objective reads."""
        return self.objective.required_outputs

    @property
    def columns(self) -> frozenset[str]:
        """The columns that the objective reads, and the weights."""
        return self.objective.columns | {PROMPT_WEIGHTS}

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Return the columns that the objective prepares, and the weight per token."""
        _, prompt = torch.unique(batch.group_ids, return_inverse=True)
        prompt_of_token = prompt[batch.sequence_index]
        trained = batch.loss_mask.double()
        counts = trained.new_zeros(int(prompt.max()) + 1).index_add(0, prompt_of_token, trained)
        num_prompts = int((counts > 0).sum())
        # At least 1, because a mini-batch without trained tokens has no prompts: its loss is 0.
        weights = trained / (counts[prompt_of_token] * num_prompts).clamp(min=1.0)
        return {**self.objective.prepare(batch, seed=seed), PROMPT_WEIGHTS: weights.float()}

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the weighted losses [T] of one micro-batch and the objective's metrics."""
        terms = self.objective(head_outputs, batch)
        weight = batch.columns[PROMPT_WEIGHTS]
        return replace(terms, weight=weight if terms.weight is None else weight * terms.weight)
