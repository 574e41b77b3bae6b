"""Off-policy sequence masking, token by token."""

import pytest

from packages.trainer.tests.algorithms.policy_losses.surrogates_for_tests import (
    answers_of,
    batch_of,
    gradient,
    losses,
)
from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.policy_losses.sequence_mask_loss import Opsm


def opsm_batch(*advantages: float) -> tuple[dict[str, list[float]], ...]:
    return tuple(
        {
            "advantages": [advantage] * 2,
            "old_logprobs": [-1.0, -1.0],
            "rollout_logprobs": [-0.5, -1.0],
        }
        for advantage in advantages
    )


def test_opsm_masks_a_negative_completion_that_the_policy_would_not_write() -> None:
    # The sampler's log-probs are above the policy's by 0.7 and 0.1, mean 0.4. The second completion
    # has a positive advantage; the third is where the sampler is: -0.3, -0.1.
    batch = batch_of(*opsm_batch(-1.0, 1.0, -1.0))
    answers = answers_of([-1.2, -1.1], [-1.2, -1.1], [-0.2, -0.9])
    objective = PolicyObjective(loss=Opsm(max_kl=0.39))
    ppo = losses(PolicyObjective(), answers, batch)
    assert losses(objective, answers, batch) == [0.0, 0.0, *ppo[2:]]
    assert gradient(objective, answers, batch)[:2] == [0.0, 0.0]
    fraction = objective(answers, batch).metrics["policy/opsm_fraction"]
    assert fraction.result == pytest.approx(1 / 3)
    assert losses(PolicyObjective(loss=Opsm(max_kl=0.41)), answers, batch) == ppo


def test_opsm_masks_and_reports_in_a_step_with_one_update() -> None:
    batch = batch_of(*opsm_batch(-1.0))
    terms = PolicyObjective(loss=Opsm(max_kl=0.1), old_is_current=True)(
        answers_of([-1.2, -1.1]), batch
    )
    assert terms.loss[1:].tolist() == [0.0, 0.0]
    assert terms.metrics["policy/opsm_fraction"].result == 1.0


def test_opsm_refuses_a_bound_of_zero() -> None:
    with pytest.raises(ConfigError, match="max_kl of Opsm is 0"):
        PolicyObjective(loss=Opsm(max_kl=0.0))
