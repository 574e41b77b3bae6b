"""Adding an algorithm takes one new file: it is found, configured, documented and used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import temper_trainer

FILES = {
    "policy_losses/soft_clip.py": '''
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.settings.lazy_torch import torch
from temper_trainer.settings.ranges import PositiveFloat
from temper_trainer.settings.variants import variant


@variant("soft_clip")
class SoftClip(PolicyLoss):
    """A smooth clip."""

    width: PositiveFloat = 0.2
    """Width of the clip."""

    def compute_surrogate(self, log_ratio, *, logprobs, advantages, batch):
        return -advantages * self.width * torch.tanh((log_ratio.exp() - 1.0) / self.width)
''',
    "advantages/estimators/best_of_group.py": '''
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.settings.variants import variant


@variant("best_of_group")
class BestOfGroup(AdvantageEstimator):
    """The reward minus the best one."""

    def estimate(self, step):
        return step.rewards - step.rewards.max(), None
''',
    "advantages/estimators/one_step.py": '''
from typing import ClassVar

from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.settings.ranges import PositiveFloat
from temper_trainer.settings.variants import variant


@variant("one_step")
class OneStep(AdvantageEstimator):
    """The reward minus the critic's value."""

    inputs: ClassVar[frozenset[str]] = frozenset({"values"})
    is_per_token: ClassVar[bool] = True
    value_clip: PositiveFloat | None = None
    """Range of the value loss around the old value."""

    def estimate(self, step):
        returns = step.rewards[step.samples.sequence_index]
        return returns - step.values, returns
''',
    "distillation_losses/absolute.py": '''
from temper_trainer.algorithms.distillation_losses.distillation_loss import DistillationLoss
from temper_trainer.settings.variants import variant


@variant("absolute")
class Absolute(DistillationLoss):
    """The absolute difference."""

    def measure(self, policy, *, teacher):
        return (policy - teacher).abs()
''',
    "preference_losses/linear.py": '''
from temper_trainer.algorithms.preference_losses.preference_loss import PairLoss
from temper_trainer.settings.ranges import PositiveFloat
from temper_trainer.settings.variants import variant


@variant("linear")
class Linear(PairLoss):
    """The negative difference."""

    beta: PositiveFloat = 1.0
    """Factor of the difference."""

    def score(self, logprobs):
        return logprobs.policy

    def compute_pair_loss(self, difference):
        return -self.beta * difference
''',
}
PROGRAM = """
import torch
from temper_engine_api.batch import from_sequences
from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
from temper_trainer.algorithms.objectives.objective_factory import (
    build_policy_objective,
    build_value_objective,
)
from temper_trainer.config_loading import load

config = load([
    "experiment=quickstart",
    "algorithm.advantage=best_of_group",
    "algorithm.policy_loss=soft_clip",
    "algorithm.policy_loss.width=0.5",
]).config
print(build_policy_objective(config.algorithm).loss)
samples = from_sequences([torch.arange(2)] * 2, loss_masks=[torch.arange(2) > 0] * 2)
rewards = torch.tensor([1.0, 3.0])
print(estimate_advantages(config.algorithm, samples=samples, rewards=rewards).advantages.tolist())
critic = load([
    "experiment=quickstart",
    "critic=value_model",
    "critic.engine.optimizer.lr=1e-5",
    "algorithm.advantage={name: one_step, value_clip: 0.3}",
]).config.algorithm
print(build_value_objective(critic).clip)
values = torch.tensor([0.0, 0.5, 0.0, 1.0])
print(estimate_advantages(
    critic, samples=samples, rewards=rewards, values=values
).advantages.tolist())
small = ["actor.engine.model.path=m", "data.train.paths=[a]", "actor.engine.optimizer.lr=1e-5"]
print(load([*small, "task=dpo", "preference=linear", "preference.beta=2"]).config.preference)
teacher = ["algorithm=distill", "teachers.t.engine.model.path=m", "distillation.objective=absolute"]
print(load([*small, *teacher]).config.distillation.loss)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of a process whose trainer has the new files."""
    root = tmp_path_factory.mktemp("new")
    package = Path(str(temper_trainer.__file__)).parent
    copy = root / package.name
    shutil.copytree(package, copy)  # with its bytecode files, which stay valid
    for name, text in FILES.items():
        (copy / "algorithms" / name).write_text(text)
    return os.environ | {"PYTHONPATH": str(root)}


def run_python(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_new_file_is_all_that_a_new_algorithm_needs(environment: dict[str, str]) -> None:
    assert run_python(environment, "-c", PROGRAM).splitlines() == [
        "SoftClip(width=0.5)",
        "[0.0, -2.0, 0.0, 0.0]",
        "0.3",
        "[0.0, 0.5, 0.0, 2.0]",
        "Linear(beta=2.0)",
        "Absolute()",
    ]


def test_help_lists_the_new_algorithm_with_its_settings(environment: dict[str, str]) -> None:
    text = run_python(environment, "-m", "temper_trainer", "--help", "algorithm.policy_loss")
    assert "soft_clip" in text
    assert "Width of the clip." in text
