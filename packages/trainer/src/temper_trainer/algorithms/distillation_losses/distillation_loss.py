"""The base class of distillation losses."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from temper_trainer.settings.variants import Variant

if TYPE_CHECKING:
    from torch import Tensor


class DistillationLoss(Variant):
    """A divergence per trained token from the log-probs of policy and teacher.

    An alternative of ``distillation.objective`` is a class with the decorator ``variant(name)``;
    its fields are its settings. It derives from this class if it reads the sampled tokens, and from
    ``TopKLoss`` if it reads the teacher's most likely tokens. ``DistillationObjective`` masks,
    clamps and weighs the result.
    """

    __slots__ = ()
    is_reward: ClassVar[bool] = False
    """True if the negative divergence is a reward of the sampled token, not a loss."""

    @property
    def num_teacher_tokens(self) -> int:
        """Number of most likely tokens that a teacher returns per position; 0 is none."""
        return 0

    @abstractmethod
    def measure(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        """Return the divergence per token, [T].

        Args:
            policy: Log-probs of the policy, with gradient in a loss: [T] for the sampled tokens, or
                [T, K] for the teacher's most likely tokens.
            teacher: Log-probs of the teacher at the same tokens, without gradient. In [T, K], -inf
                pads rows with fewer tokens, and untrained rows consist of padding.
        """
