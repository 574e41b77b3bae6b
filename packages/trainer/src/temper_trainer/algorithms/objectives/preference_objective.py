"""The objective of preference optimization: a preference loss on the log-probs of completions."""

from dataclasses import dataclass, field

import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.metrics import Metric, compute_weighted_mean
from temper_engine_api.objective import (
    Aggregation,
    AggregationMode,
    HeadOutput,
    HeadOutputs,
    LossTerms,
    Objective,
    register_objective,
)
from temper_engine_api.reduction import sum_per_sequence
from temper_trainer.algorithms.objectives.policy_objective import measure_entropy
from temper_trainer.algorithms.preference_losses.preference_loss import (
    CompletionLogprobs,
    PreferenceLoss,
    measure_order,
)
from temper_trainer.algorithms.preference_losses.reference_losses import Dpo
from temper_trainer.types import IS_CHOSEN


def make_group_mean() -> Aggregation:
    """Return the mean over groups, which are pairs."""
    return Aggregation(mode=AggregationMode.GROUP_MEAN)


@register_objective("preference")
@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceObjective(Objective):
    """Train a policy with a preference loss: the mean over pairs or labeled completions.

    A labeled completion is a separate group. The two sequences of a pair have the same
    ``pack_group_id``, so they are never split.
    """

    loss: PreferenceLoss = field(default_factory=Dpo)
    """Computes the loss per completion."""
    aggregation: Aggregation = field(default_factory=make_group_mean)
    """Must be group_mean, the mean over pairs."""

    def __post_init__(self) -> None:
        if self.aggregation.mode != AggregationMode.GROUP_MEAN:
            raise ConfigError(
                f"the aggregation of preference losses is {self.aggregation.mode.value}, but must "
                "be group_mean, the mean over pairs."
            )

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Log-probs, and the entropy as a metric."""
        return frozenset({HeadOutput.LOGPROB, HeadOutput.ENTROPY})

    @property
    def columns(self) -> frozenset[str]:
        """is_chosen, ref_logprobs if there is a reference, and the loss's own."""
        reference = set() if self.loss.reference == "none" else {"ref_logprobs"}
        return self.loss.own_columns | reference | {IS_CHOSEN}

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Return the losses [B] of one micro-batch, which must contain complete pairs."""
        mask = batch.loss_mask
        policy = torch.where(mask, head_outputs[HeadOutput.LOGPROB], 0.0)
        reference = (
            torch.zeros_like(policy)
            if self.loss.reference == "none"
            else torch.where(mask, batch.columns["ref_logprobs"], 0.0)
        )
        logprobs = CompletionLogprobs(
            policy=sum_per_sequence(policy, batch),
            reference=sum_per_sequence(reference, batch),
            # At least 1, because a dummy sequence has no trained token.
            num_tokens=sum_per_sequence(mask.float(), batch).clamp(min=1.0),
        )
        loss = self.loss.compute_losses(logprobs, batch)
        metrics = self._measure_rewards(logprobs, batch) | self.loss.measure(batch)
        metrics |= measure_entropy(head_outputs, mask=mask)
        return LossTerms(loss=loss, level="sequence", metrics=metrics)

    def _measure_rewards(
        self, logprobs: CompletionLogprobs, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return means of the implicit rewards, which are beta times the scores."""
        score, is_chosen = self.loss.score(logprobs), batch.sequence_columns[IS_CHOSEN]
        margin = self.loss.compute_margin(score, batch)
        # Ranks without samples run a dummy sequence, which must not count in the metrics.
        real, beta = ~batch.is_dummy, self.loss.beta
        return {
            "preference/accuracy": compute_weighted_mean(measure_order(margin), real),
            "preference/margin": compute_weighted_mean(beta * margin, real),
            "preference/chosen_reward": compute_weighted_mean(beta * score, real & is_chosen),
            "preference/rejected_reward": compute_weighted_mean(beta * score, real & ~is_chosen),
        }
