"""Objectives of the trainer as settings of the deprecated workers: the same loss, or an error."""

import pytest

pytest.importorskip("temper_engine_fsdp", reason="needs the extra [workers]")

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_legacy_shim.workers.trainer_worker import DeprecatedTrainingWorker
from temper_trainer.algorithms.kl import KlLossEstimator
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo
from temper_trainer.algorithms.policy_losses.divergence_losses import Dppo


def worker() -> DeprecatedTrainingWorker:
    return DeprecatedTrainingWorker(
        engine_name="fsdp", config=FSDPConfig(model=ModelSpec(path="unused")), num_threads=None
    )


@pytest.mark.parametrize(("estimator", "clamp"), [("k2", None), ("k3", None), ("k3", 10.0)])
def test_a_kl_that_the_old_loss_had_is_accepted(
    estimator: KlLossEstimator, clamp: float | None
) -> None:
    worker().set_objective(
        PolicyObjective(loss=Ppo(), kl_coef=0.1, kl_estimator=estimator, kl_clamp=clamp)
    )


@pytest.mark.parametrize(
    ("estimator", "clamp"), [("k1+", None), ("k3+", 10.0), ("k3_ratio", None), ("k3", 5.0)]
)
def test_a_kl_that_the_old_loss_did_not_have_is_an_error(
    estimator: KlLossEstimator, clamp: float | None
) -> None:
    objective = PolicyObjective(loss=Ppo(), kl_coef=0.1, kl_estimator=estimator, kl_clamp=clamp)
    with pytest.raises(ConfigError, match=r"kl_estimator is .* use_legacy_worker_impl=disable"):
        worker().set_objective(objective)


def test_a_loss_that_the_old_workers_did_not_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'dppo' has no deprecated counterpart"):
        worker().set_objective(PolicyObjective(loss=Dppo()))
