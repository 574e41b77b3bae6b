"""Credit over the turns of a rollout."""

from torch import Tensor


def discounted_by_turn(advantages: Tensor, *, turns_after: Tensor, discount: float) -> Tensor:
    """Advantages of earlier turns made smaller: what was said last did most for the outcome.

    A_t = A_t * discount ** (completions of the rollout after the token's own).

    Args:
        advantages: [T].
        turns_after: [T] float32, 0 in the last completion.
        discount: from 0, where the last turn alone is credited, to 1, where all are alike.

    Returns:
        [T].
    """
    return advantages * discount**turns_after
