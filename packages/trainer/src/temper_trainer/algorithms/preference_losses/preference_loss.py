"""The base classes of preference losses, and the sums over completions that they compare."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from temper_trainer.settings.lazy_torch import torch
from temper_trainer.settings.variants import Variant
from temper_trainer.types import IS_CHOSEN

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch
    from temper_engine_api.metrics import Metric

ReferenceSource = Literal["ref", "disabled_adapter", "none"]
"""ref: the ref role; disabled_adapter: the actor without its adapter; none: no reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionLogprobs:
    """Log-probs of a micro-batch's completions, summed over their trained tokens."""

    policy: Tensor
    """[B] with gradient."""
    reference: Tensor
    """[B]; 0 without a reference."""
    num_tokens: Tensor
    """[B] float32 number of trained tokens; 1 for a dummy sequence, which has none."""

    @property
    def policy_mean(self) -> Tensor:
        """[B] log-prob of the policy per token."""
        return self.policy / self.num_tokens

    @property
    def log_ratio(self) -> Tensor:
        """[B] sum of log p - log p_ref."""
        return self.policy - self.reference


class PreferenceLoss(Variant):
    """A loss per completion from its log-probs; the fields of an alternative are its settings.

    An alternative of ``preference`` is a class with the decorator ``variant(name)``, derived from
    ``PairLoss`` if it compares both completions in a pair. ``PreferenceObjective`` computes the
    log-probs of the completions, and takes the mean over pairs or labeled completions.
    """

    __slots__ = ()
    is_paired: ClassVar[bool] = True
    """False if it trains on single completions with a label."""
    own_columns: ClassVar[frozenset[str]] = frozenset()
    """Columns that this loss reads in addition to the common columns of preference losses."""
    beta: float
    """Factor between `score` and the implicit reward that is reported."""

    @property
    def reference(self) -> ReferenceSource:
        """Source of the reference log-probs; a field of the losses that have a reference."""
        return "none"

    @abstractmethod
    def score(self, logprobs: CompletionLogprobs) -> Tensor:
        """Return [B] the quantity that the loss raises for preferred completions."""

    @abstractmethod
    def compute_margin(self, score: Tensor, batch: SequenceBatch) -> Tensor:
        """Return [B] the scores' margin, which is above 0 where the policy has the preference."""

    def measure(self, batch: SequenceBatch) -> dict[str, Metric]:
        """Return its own metrics; empty by default."""
        return {}

    @abstractmethod
    def compute_losses(self, logprobs: CompletionLogprobs, batch: SequenceBatch) -> Tensor:
        """Return the losses [B], which add up to the group's loss."""


class PairLoss(PreferenceLoss):
    """A loss on the score difference between the two completions in a pair."""

    __slots__ = ()

    @property
    def likelihood_coef(self) -> float:
        """Weight for adding the chosen completion's mean negative log-likelihood."""
        return 0.0

    @abstractmethod
    def compute_pair_loss(self, difference: Tensor) -> Tensor:
        """Return the loss per pair.

        Args:
            difference: Score of the chosen completion minus the rejected one's.
        """

    def compute_margin(self, score: Tensor, batch: SequenceBatch) -> Tensor:
        """Return [B] each pair's difference, on both completions."""
        return compute_pair_difference(score, batch)

    def compute_losses(self, logprobs: CompletionLogprobs, batch: SequenceBatch) -> Tensor:
        """Return the losses [B]: half of the pair's on each completion, plus the likelihood."""
        # Both sequences in a pair have the same difference, so each carries half of the loss.
        loss = 0.5 * self.compute_pair_loss(self.compute_margin(self.score(logprobs), batch))
        if self.likelihood_coef:
            is_chosen = batch.sequence_columns[IS_CHOSEN]
            loss = loss - self.likelihood_coef * torch.where(is_chosen, logprobs.policy_mean, 0.0)
        return loss


def compute_pair_difference(column: Tensor, batch: SequenceBatch) -> Tensor:
    """Return [B] the chosen sequence's entry minus the rejected one's, on both sequences in a pair.

    Gradients flow through the difference.
    """
    return sum_over_pair(torch.where(batch.sequence_columns[IS_CHOSEN], column, -column), batch)


def sum_over_pair(column: Tensor, batch: SequenceBatch) -> Tensor:
    """Return [B] sums over both sequences in each pair, on both of them."""
    pairs, pair_index = torch.unique(batch.pack_group_ids, return_inverse=True)
    return column.new_zeros(len(pairs)).index_add(0, pair_index, column)[pair_index]


def measure_order(margin: Tensor) -> Tensor:
    """Return the accuracy per margin, [B]: 1 above 0, 0 below, and 1/2 if it is 0.

    Equal rewards say as much as a guess. All of them are equal before the first update, where the
    policy is its own reference.
    """
    return 0.5 * (1.0 + torch.sign(margin))
