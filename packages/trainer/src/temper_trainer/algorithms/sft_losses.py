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


@variant("dft")
class Dft(SftLoss):
    """Dynamic fine-tuning: each token's likelihood is weighted with its own probability.

        loss = -sg(p) * log p

    sg is stop-gradient. The gradient of -log p has the factor 1 / p, which lets unlikely tokens
    dominate; the weight removes it.

    Source: Wu et al. 2025, arXiv:2508.05629, the loss per token of section 3.
    """

    def compute_losses(self, logprobs: Tensor) -> Tensor:
        """Return -sg(p) * log p."""
        return -logprobs.detach().exp() * logprobs
