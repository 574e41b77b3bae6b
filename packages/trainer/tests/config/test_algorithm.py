"""Settings of the algorithm that contradict each other, or have no effect together, are refused."""

import math

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.algorithms.advantages.estimators.group_estimators import Grpo, ReMax
from temper_trainer.algorithms.advantages.estimators.token_estimators import Gae, ReinforcePlusPlus
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo
from temper_trainer.config.algorithm import AlgorithmConfig, BatchingConfig, KlControllerConfig
from temper_trainer.settings.variants import list_variants


def test_default_algorithm_settings_are_unchanged() -> None:
    config = AlgorithmConfig()
    assert (config.advantage, config.aggregation, config.kl_controller) == (
        Grpo(),
        "token_mean",
        None,
    )


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_group_estimators_need_two_completions_per_prompt(name: str) -> None:
    with pytest.raises(ConfigError, match="raise it to 2"):
        AlgorithmConfig(advantage=list_variants(AdvantageEstimator)[name](), group_size=1)


@pytest.mark.parametrize("estimator", [Gae(gamma=0.99), ReinforcePlusPlus(gamma=0.99), ReMax()])
def test_other_estimators_accept_one_completion(estimator: AdvantageEstimator) -> None:
    assert AlgorithmConfig(advantage=estimator, group_size=1).advantage == estimator


def test_k1_is_refused_in_the_loss_but_not_in_the_reward() -> None:
    with pytest.raises(ConfigError, match="zero expected gradient"):
        AlgorithmConfig(kl_loss_coef=0.1, kl_estimator="k1")
    assert AlgorithmConfig(kl_reward_coef=0.1, kl_estimator="k1").kl_estimator == "k1"


def test_horizon_is_accepted_only_by_the_aggregation_that_divides_by_it() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.horizon is None"):
        AlgorithmConfig(aggregation="sequence_mean_token_sum_norm")
    with pytest.raises(ConfigError, match=r"algorithm\.horizon is 64"):
        AlgorithmConfig(horizon=64)


def test_adaptive_kl_needs_an_initial_coefficient() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl_reward_coef is 0, which no factor changes"
    ):
        AlgorithmConfig(kl_controller=KlControllerConfig(target=6.0))
    with pytest.raises(ConfigError, match=r"target.* is inf"):
        KlControllerConfig(target=math.inf)


def test_dual_clip_must_be_above_one() -> None:
    with pytest.raises(ConfigError, match="above 1"):
        Ppo(dual_clip=1.0)


def test_sizes_of_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BatchingConfig(num_passes=0)


def test_more_mini_batches_than_prompts_name_both_keys() -> None:
    with pytest.raises(
        ConfigError, match=r"batching\.num_mini_batches is 5, but batching\.prompts_per_step is 4"
    ):
        BatchingConfig(prompts_per_step=4, num_mini_batches=5)
