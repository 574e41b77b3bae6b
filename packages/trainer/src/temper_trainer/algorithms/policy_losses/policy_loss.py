"""The base class for policy losses, and the parts that several losses use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from temper_trainer.settings.lazy_torch import compute_weighted_mean, sum_per_sequence, torch
from temper_trainer.settings.variants import Variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch
    from temper_engine_api.metrics import Metric


class PolicyLoss(Variant):
    """A loss per trained token from log-probs and advantages; its fields are its settings.

    An alternative of ``algorithm.policy_loss`` is a class with the decorator ``variant(name)``.
    ``PolicyObjective`` computes the log-ratio, and adds correction weights, entropy bonus and KL.
    """

    __slots__ = ()
    always_needs_old_logprobs: ClassVar[bool] = False
    """True if it reads old_logprobs even if a step makes only one update."""
    prepared_columns: ClassVar[frozenset[str]] = frozenset()
    """Names of the columns that ``prepare`` returns."""
    published_aggregation: ClassVar[str | None] = None
    """Aggregation in the loss's paper. A run that uses another aggregation gets a warning."""
    own_columns: ClassVar[frozenset[str]] = frozenset()
    """Columns that this loss reads in addition to the common columns of policy losses."""

    @abstractmethod
    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """Return the surrogate losses [T] to minimize.

        Args:
            log_ratio: [T] ``log p - log p_old`` with gradient, clamped, 0 at untrained tokens; see
                ``compute_effective_log_ratio``.
            logprobs: [T] of the policy with gradient, 0 at untrained tokens.
            advantages: [T], 0 at untrained tokens.
            batch: The micro-batch.
        """

    def compute_effective_log_ratio(self, log_ratio: Tensor, batch: SequenceBatch) -> Tensor:
        """Return the log-ratio [T] to use in the surrogate; by default each token's own."""
        return log_ratio

    def clip_metrics(
        self, log_ratio: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return clip-fraction metrics; empty by default, and left out if the ratio is always 1."""
        return {}

    def mask_metrics(
        self, logprobs: Tensor, *, advantages: Tensor, batch: SequenceBatch
    ) -> dict[str, Metric]:
        """Return fractions of masked tokens, reported in every step; empty by default."""
        return {}

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Compute per-token columns [T] from the mini-batch; see ``Objective.prepare``."""
        return {}


def compute_sequence_mean(column: Tensor, batch: SequenceBatch) -> Tensor:
    """Return the mean of a column [T] over its sequence's trained tokens, repeated on every token.

    Gradients flow through the mean.
    """
    mask = batch.loss_mask
    # At least 1, because a dummy sequence has no trained token.
    trained = sum_per_sequence(mask.float(), batch).clamp(min=1.0)
    mean = sum_per_sequence(torch.where(mask, column, 0.0), batch) / trained
    return mean[batch.sequence_index]


def compute_clip_fractions(
    *, is_low: Tensor, is_high: Tensor, advantages: Tensor, mask: Tensor
) -> dict[str, Metric]:
    """Return the fractions of trained tokens whose gradient the low and the high clip remove.

    The low clip removes the gradient of tokens below the clip range with a negative advantage. The
    high clip removes it for tokens above the range with a positive advantage.
    """
    return {
        "policy/clip_fraction_low": compute_weighted_mean(is_low & (advantages < 0), mask),
        "policy/clip_fraction_high": compute_weighted_mean(is_high & (advantages > 0), mask),
    }
