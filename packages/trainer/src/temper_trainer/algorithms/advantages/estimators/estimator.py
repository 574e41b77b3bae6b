"""The base class of advantage estimators, and what they are given."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from temper_trainer.settings.variants import Variant

if TYPE_CHECKING:
    from torch import Tensor

    from temper_engine_api.batch import SequenceBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRewards:
    """Rewards of a step, and what some estimators need in addition: B sequences, T tokens.

    Example:
        Two completions for one prompt with rewards 1 and 0, each a prompt token and a trained
        token, without KL penalty:

        >>> import torch
        >>> from temper_engine_api.batch import from_sequences
        >>> from temper_trainer.algorithms.advantages.estimators.group_estimators import DrGrpo
        >>> step = StepRewards(
        ...     samples=from_sequences(
        ...         [torch.tensor([5, 6]), torch.tensor([5, 7])],
        ...         loss_masks=[torch.tensor([False, True])] * 2,
        ...         group_ids=[0, 0],
        ...     ),
        ...     rewards=torch.tensor([1.0, 0.0], dtype=torch.float64),
        ...     token_rewards=torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64),
        ...     penalty=torch.zeros(2, dtype=torch.float64),
        ... )
        >>> advantages, returns = DrGrpo().estimate(step)
        >>> advantages.tolist()
        [0.5, -0.5]
    """

    samples: SequenceBatch
    """``group_ids`` defines the groups; the order does not matter."""
    rewards: Tensor
    """[B] float64 rewards, minus the KL penalty summed over the trained tokens."""
    token_rewards: Tensor
    """[T] float64: the reward at the last trained token, minus the KL penalty of each token."""
    penalty: Tensor
    """[B] float64 KL penalty."""
    values: Tensor | None = None
    """[T] critic values before this step's first update."""
    baselines: Tensor | None = None
    """[B] rewards of the greedy completions."""
    components: Tensor | None = None
    """[B, K] rewards whose weighted sum is the reward."""
    component_weights: Sequence[float] = ()
    """K component weights."""


class AdvantageEstimator(Variant):
    """Turns the rewards of a step into advantages; its fields are its settings.

    The decorator ``variant(name)`` makes a subclass selectable as ``algorithm.advantage=name``.
    """

    __slots__ = ()
    inputs: ClassVar[frozenset[str]] = frozenset()
    """Optional fields of ``StepRewards`` that it needs; others are None."""
    compares_group: ClassVar[bool] = True
    """True if it compares the completions of a prompt, and so needs at least two."""
    whitens: ClassVar[bool] = False
    """True if its advantages are whitened over the step."""

    is_per_token: ClassVar[bool] = False
    """True if the tokens of a rollout may differ in advantage even without a KL penalty."""

    @property
    def value_clip(self) -> float | None:
        """Clip range of the value loss around the old value; None does not clip."""
        return None

    @abstractmethod
    def estimate(self, step: StepRewards) -> tuple[Tensor, Tensor | None]:
        """Return float64 advantages [B] or [T], and returns [T] if there is a critic to train."""
