"""Test estimators and objectives of users, which replace the built-in ones or are refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import BatchError, ConfigError
from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
from temper_trainer.algorithms.objectives.objective_factory import (
    build_policy_objective,
    needs_old_logprobs,
)
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.config.algorithm import AlgorithmConfig, BatchingConfig
from temper_trainer.settings.ranges import PositiveFloat
from temper_trainer.settings.variants import Custom, settings

HERE = "test_custom_algorithms"
SAMPLES = from_sequences(
    [torch.arange(n) for n in (3, 2)], loss_masks=[torch.arange(n) > 0 for n in (3, 2)]
)


def half(rewards: Tensor, *, samples: SequenceBatch, factor: float = 0.5) -> Tensor:
    return factor * rewards


def return_token_index(rewards: Tensor, *, samples: SequenceBatch) -> Tensor:
    return samples.get_position_ids().double()


def too_many(rewards: Tensor, *, samples: SequenceBatch) -> Tensor:
    return torch.zeros(4)


def endless(rewards: Tensor, *, samples: SequenceBatch) -> Tensor:
    return rewards / 0


@settings
class Plain(PolicyLoss):
    factor: PositiveFloat = 1.0

    def compute_surrogate(
        self, log_ratio: Tensor, *, logprobs: Tensor, advantages: Tensor, batch: SequenceBatch
    ) -> Tensor:
        return -self.factor * log_ratio.exp() * advantages


@pytest.fixture(autouse=True)
def module_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def advantages(name: str, **arguments: float) -> list[float]:
    config = AlgorithmConfig(advantage=Custom(name=f"{HERE}:{name}", arguments=arguments))
    return estimate_advantages(
        config, samples=SAMPLES, rewards=torch.tensor([4.0, 2.0])
    ).advantages.tolist()


def test_custom_estimator_may_return_completion_or_token_advantages() -> None:
    assert advantages("half") == [0.0, 2.0, 2.0, 0.0, 1.0]
    assert advantages("half", factor=-1.0) == [0.0, -4.0, -4.0, 0.0, -2.0]
    assert advantages("return_token_index") == [0.0, 1.0, 2.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("too_many", r"a tensor of shape \(4,\), but must return"), ("endless", "finite numbers")],
)
def test_invalid_results_of_a_custom_estimator_are_refused(name: str, complaint: str) -> None:
    with pytest.raises(BatchError, match=complaint):
        advantages(name)


def test_custom_objective_gets_its_arguments_and_the_common_keys() -> None:
    config = AlgorithmConfig(
        policy_loss=Custom(name=f"{HERE}:Plain", arguments={"factor": 3.0}), entropy_coef=0.1
    )
    objective = build_policy_objective(config)
    assert type(objective.loss).__name__ == "Plain"
    assert (objective.loss.factor, objective.entropy_coef) == (3.0, 0.1)  # type: ignore[attr-defined]
    assert not needs_old_logprobs(config, BatchingConfig())


@pytest.mark.parametrize(
    ("custom", "complaint"),
    [
        (Custom(name=f"{HERE}:half"), "does not derive from .*PolicyLoss"),
        (Custom(name=f"{HERE}:Plaine"), "Did you mean 'Plain'"),
        (
            Custom(name=f"{HERE}:Plain", arguments={"width": 1.0}),
            "names width, but the arguments of .* are factor",
        ),
        (
            Custom(name=f"{HERE}:Plain", arguments={"factor": -1.0}),
            "arguments: factor of Plain is -1.0, but must be above 0",
        ),
        (Custom(name="no_such_module:Loss"), "add the folder that contains it to PYTHONPATH"),
    ],
)
def test_invalid_custom_loss_is_refused(custom: Custom, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build_policy_objective(AlgorithmConfig(policy_loss=custom))


def test_unknown_arguments_of_a_custom_estimator_are_refused() -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'width'"):
        advantages("half", width=1.0)
