"""Distillation objectives of users, which replace the built-in ones or are refused."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import from_sequences
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_trainer.algorithms.distillation_losses.distillation_loss import DistillationLoss
from temper_trainer.algorithms.distillation_losses.top_k_losses import TopKLoss
from temper_trainer.algorithms.objectives.objective_factory import add_distillation_loss
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.distillation import DistillationConfig
from temper_trainer.config_loading import load
from temper_trainer.config_loading.checks.external_checks import check_external_objects
from temper_trainer.settings.ranges import PositiveFloat
from temper_trainer.settings.variants import Custom, settings

HERE = "test_custom_distillation"
SELF = ("experiment=quickstart", "algorithm=distill", "algorithm.group_size=1", "warm_start=null")


@settings
class Absolute(DistillationLoss):
    factor: PositiveFloat = 1.0

    def measure(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        return self.factor * (policy - teacher).abs()


@settings
class Gain(Absolute):
    is_reward: ClassVar[bool] = True


@settings
class Squares(TopKLoss):
    def compute_terms(self, policy: Tensor, *, teacher: Tensor) -> Tensor:
        return (policy.exp() - teacher.exp()).square()


@settings
class TopKGain(Squares):
    is_reward: ClassVar[bool] = True


@pytest.fixture(autouse=True)
def module_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def config(name: str, **arguments: float) -> DistillationConfig:
    return DistillationConfig(objective=Custom(name=f"{HERE}:{name}", arguments=arguments))


def test_custom_objective_gets_its_arguments_and_the_common_keys() -> None:
    batch = from_sequences(
        [torch.arange(3)],
        loss_masks=[torch.arange(3) > 0],
        columns={
            "teacher_logprobs": [torch.tensor([0.0, -1.0, -2.5])],
            "teacher_weights": [torch.tensor([0.0, 1.0, 0.5])],
        },
    )
    objective = add_distillation_loss(
        None, config=config("Absolute", factor=2.0), algorithm=AlgorithmConfig()
    )
    logprobs = torch.tensor([0.0, -1.5, -1.0])
    outputs = {HeadOutput.LOGPROB: logprobs, HeadOutput.ENTROPY: torch.zeros(3)}
    terms = objective(HeadOutputs(columns=outputs), batch)
    # 2 * 0.5 * weight 1, and 2 * 1.5 * weight 0.5.
    assert (terms.loss if terms.weight is None else terms.loss * terms.weight).tolist() == (
        pytest.approx([0.0, 1.0, 1.5])
    )


def test_custom_objective_may_read_the_most_likely_tokens() -> None:
    loss = config("Squares", top_k=2).loss
    assert loss.num_teacher_tokens == 2
    policy, teacher = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    # Of the tokens 0.25^2 + 0, and of the rest (0.25 - 0.5)^2.
    assert float(loss.measure(policy, teacher=teacher)) == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("distillation", "complaint"),
    [
        (config("config"), "does not derive from .*DistillationLoss"),
        (config("Absolut"), "Did you mean 'Absolute'"),
        (config("Absolute", width=1.0), "names width, but the arguments of .* are factor"),
        (config("Absolute", factor=0.0), "factor of Absolute is 0.0, but must be above 0"),
        (config("TopKGain"), "is a reward and reads 64 tokens of the teacher"),
    ],
)
def test_invalid_objective_is_refused(distillation: DistillationConfig, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        _ = distillation.loss


def test_contradictions_of_an_imported_objective_are_found_before_the_run() -> None:
    given = (
        "distillation.self_teacher=current",
        "data.train.teacher_prompt_key=solved",
        "data.train.completion_key=solution",
        "distillation.off_policy_fraction=0.5",
    )
    loaded = load([*SELF, *given, f"distillation.objective={HERE}:Absolute"])
    with pytest.raises(ConfigError, match="Absolute, whose estimate is wrong for tokens"):
        check_external_objects(loaded.config)
    check_external_objects(load([*SELF, *given, f"distillation.objective={HERE}:Squares"]).config)
    block = f"{{name: {HERE}:Absolute, arguments: {{factor: -1}}}}"
    wrong = load([*SELF, *given[:2], f"distillation.objective={block}"])
    with pytest.raises(ConfigError, match="factor of Absolute is -1, but must be above 0"):
        check_external_objects(wrong.config)
