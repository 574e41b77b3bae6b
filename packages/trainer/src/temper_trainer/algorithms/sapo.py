"""SAPO: a soft gate on the ratio in place of a hard clip."""

from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import register_objective
from temper_trainer.algorithms.surrogate import SurrogateObjective


@register_objective("sapo")
@dataclass(frozen=True, slots=True, kw_only=True)
class SapoObjective(SurrogateObjective):
    """Tokens fade out the further the ratio is from 1, without an edge.

    loss = -(4 / tau) * sigmoid(tau * (rho - 1)) * A, with tau for positive and for other advantages. At rho = 1 the gradient is that of
    -rho * A, whatever tau.

    Source: Gao et al. 2025, arXiv:2511.20347, section 3.
    """

    positive_temperature: float = 1.0
    """tau where A > 0."""
    negative_temperature: float = 1.05
    """tau elsewhere; larger than the other in the paper, since negative advantages push up many unseen tokens."""

    def __post_init__(self) -> None:
        SurrogateObjective.__post_init__(self)
        if min(self.positive_temperature, self.negative_temperature) <= 0:
            raise ConfigError(
                f"both temperatures of sapo must be above 0, but are {self.positive_temperature}, {self.negative_temperature}."
            )

    def surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        """The soft gate times the advantage."""
        tau = torch.where(advantages > 0, self.positive_temperature, self.negative_temperature)
        return -(4.0 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * advantages
