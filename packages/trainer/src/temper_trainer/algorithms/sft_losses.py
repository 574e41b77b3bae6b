"""The union of SFT losses: settings and formula of each."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from temper_trainer.settings.variants import Variant, variant

if TYPE_CHECKING:
    from torch import Tensor


class SftLoss(Variant):
    """A loss per trained token from its log-prob; the fields of an alternative are its settings.

    An alternative of ``sft`` and ``warm_start.loss`` is a class with the decorator
    ``variant(name)``. ``SftObjective`` masks and aggregates the losses.
    """

    __slots__ = ()

    @abstractmethod
    def compute_losses(self, logprobs: Tensor) -> Tensor:
        """Return the losses [T].

        Args:
            logprobs: [T] log-probs of the demonstrations' tokens with gradient, 0 at untrained
                ones.
        """


@variant("cross_entropy")
class CrossEntropy(SftLoss):
    """Negative log-likelihood per trained token, loss = -log p."""

    def compute_losses(self, logprobs: Tensor) -> Tensor:
        """Return -log p."""
        return -logprobs
