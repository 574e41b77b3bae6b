"""KTO: a loss of single completions that are labeled desirable or undesirable."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from temper_trainer.algorithms.preference_losses.preference_loss import PreferenceLoss
from temper_trainer.settings.lazy_torch import compute_weighted_mean, torch
from temper_trainer.settings.ranges import PositiveFloat
from temper_trainer.settings.variants import variant
from temper_trainer.types import IS_CHOSEN, KL_BASELINE

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch
    from temper_engine_api.metrics import Metric
    from temper_trainer.algorithms.preference_losses.preference_loss import CompletionLogprobs


@variant("kto")
class Kto(PreferenceLoss):
    """Kahneman-Tversky optimization: completions with a label each, without pairs.

        desirable:    loss = desirable_weight * (1 - sigmoid(beta * (h - z)))
        undesirable:  loss = undesirable_weight * (1 - sigmoid(beta * (z - h)))
        h = sum log(p / ref) of the completion
        z = max(0, mean over mismatched pairs of sum log(p / ref))

    A mismatched pair is a prompt with the completion of the next example in the mini-batch. z
    estimates KL(policy, reference) on these pairs. It is computed before the update and has no
    gradient. The loss is the mean over examples.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8 and section 4.1. The authors
    advise weights with desirable_weight * num_desirable = c * undesirable_weight * num_undesirable
    and c between 1 and 4/3.
    """

    is_paired: ClassVar[bool] = False
    own_columns: ClassVar[frozenset[str]] = frozenset({KL_BASELINE})

    beta: PositiveFloat = 0.1
    """Strength of the regularization toward the reference policy."""
    reference: Literal["ref", "disabled_adapter"] = "ref"
    """ref: the ref role; disabled_adapter: the actor without its adapter."""
    desirable_weight: PositiveFloat = 1.0
    """Loss weight for desirable completions."""
    undesirable_weight: PositiveFloat = 1.0
    """Loss weight for undesirable completions."""

    def score(self, logprobs: CompletionLogprobs) -> Tensor:
        """Return [B] the sum of log(p / ref) over the completion."""
        return logprobs.log_ratio

    def compute_margin(self, score: Tensor, batch: SequenceBatch) -> Tensor:
        """Return [B] h - z for desirable completions, z - h for undesirable ones."""
        difference = score - batch.sequence_columns[KL_BASELINE]
        return torch.where(batch.sequence_columns[IS_CHOSEN], difference, -difference)

    def measure(self, batch: SequenceBatch) -> dict[str, Metric]:
        """Return z, the same for all completions in an update."""
        baseline = batch.sequence_columns[KL_BASELINE]
        return {"preference/kl_baseline": compute_weighted_mean(baseline, ~batch.is_dummy)}

    def compute_losses(self, logprobs: CompletionLogprobs, batch: SequenceBatch) -> Tensor:
        """Return the weighted 1 - sigmoid(beta * margin) per completion, [B]."""
        margin = self.compute_margin(self.score(logprobs), batch)
        is_desirable = batch.sequence_columns[IS_CHOSEN]
        weight = torch.where(is_desirable, self.desirable_weight, self.undesirable_weight)
        # sigmoid(-x) instead of 1 - sigmoid(x), which would round small results to 0.
        return weight * torch.sigmoid(-self.beta * margin)
