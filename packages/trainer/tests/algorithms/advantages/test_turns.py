import pytest
import torch

from temper_trainer.algorithms.advantages.advantage_statistics import discount_by_turn

TURNS_AFTER = torch.tensor([2.0, 2.0, 1.0, 0.0])
ADVANTAGES = torch.tensor([4.0, 0.0, -2.0, 3.0])


@pytest.mark.parametrize(
    ("discount", "expected"),
    [(0.5, [1.0, 0.0, -1.0, 3.0]), (1.0, [4.0, 0.0, -2.0, 3.0]), (0.0, [0.0, 0.0, 0.0, 3.0])],
)
def test_turn_is_discounted_once_for_each_later_turn(
    discount: float, expected: list[float]
) -> None:
    # 4 * 0.5^2 = 1, -2 * 0.5 = -1; the last turn keeps its 3, also with 0, since 0^0 is 1.
    assert (
        discount_by_turn(ADVANTAGES, turns_after=TURNS_AFTER, discount=discount).tolist()
        == expected
    )
