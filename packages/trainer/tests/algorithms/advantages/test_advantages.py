"""Every advantage estimator, called by `estimate_advantages`."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import BatchError
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.algorithms.advantages.estimators.group_estimators import DrGrpo, Grpo, Rloo
from temper_trainer.algorithms.advantages.estimators.token_estimators import Gae, Vapo
from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.settings.variants import list_variants
from temper_trainer.types import Advantages

ESTIMATORS: tuple[str, ...] = tuple(list_variants(AdvantageEstimator))
LENGTHS = (3, 5, 2, 4, 6, 3)
GROUPS = (1, 0, 1, 0, 1, 2)
REWARDS = torch.tensor([1.0, 0.25, 0.0, 1.0, 0.5, 1.0])
WITH_CRITIC = tuple(
    name
    for name, estimator in list_variants(AdvantageEstimator).items()
    if "values" in estimator.inputs
)


def make_samples(group_ids: tuple[int, ...] = GROUPS) -> SequenceBatch:
    masks = [torch.arange(n) >= 1 for n in LENGTHS]
    logprobs = [torch.linspace(-n, -0.1, n).where(torch.arange(n) >= 1, math.nan) for n in LENGTHS]
    return from_sequences(
        [torch.arange(n) for n in LENGTHS],
        loss_masks=masks,
        group_ids=group_ids,
        columns={"rollout_logprobs": logprobs},
    )


def estimate(
    config: AlgorithmConfig, *, samples: SequenceBatch, rewards: Tensor, **others: Tensor | None
) -> Advantages:
    """Estimate with baselines of 0.5 for remax, and two equal components for gdpo."""
    baselines = torch.full_like(rewards, 0.5) if config.reads("baselines") else None
    components = (
        torch.stack([rewards / 2, rewards / 2], dim=1) if config.reads("components") else None
    )
    return estimate_advantages(
        config,
        samples=samples,
        rewards=rewards,
        baselines=baselines,
        components=components,
        component_weights=() if components is None else (1.0, 1.0),
        **others,
    )


def values_for(name: str, samples: SequenceBatch) -> torch.Tensor | None:
    return torch.linspace(-1.0, 1.0, samples.num_tokens) if name in WITH_CRITIC else None


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=10)
@given(order=st.permutations(range(len(LENGTHS))))
def test_advantages_do_not_depend_on_the_order_of_samples(name: str, order: list[int]) -> None:
    samples, config = (
        make_samples(),
        AlgorithmConfig(advantage=list_variants(AdvantageEstimator)[name]()),
    )
    values = values_for(name, samples)
    straight = estimate(config, samples=samples, rewards=REWARDS, values=values).advantages
    columns = {"straight": straight} if values is None else {"straight": straight, "values": values}
    mixed = samples.with_columns(columns).select(order)
    estimated = estimate(
        config, samples=mixed, rewards=REWARDS[order], values=mixed.columns.get("values")
    )
    torch.testing.assert_close(
        estimated.advantages, mixed.columns["straight"], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_untrained_tokens_have_zero_advantage_and_their_nan_is_ignored(name: str) -> None:
    samples = make_samples()
    hole = torch.where(samples.loss_mask, 0.1, math.nan)
    config = AlgorithmConfig(
        advantage=list_variants(AdvantageEstimator)[name](), kl_reward_coef=0.5
    )
    estimated = estimate(
        config,
        samples=samples,
        rewards=REWARDS,
        values=hole if name in WITH_CRITIC else None,
        kl=hole,
    )
    assert bool(estimated.advantages.isfinite().all())
    assert not bool(estimated.advantages[~samples.loss_mask].any())
    assert estimated.advantages.dtype == torch.float32


def test_only_estimators_with_a_critic_return_value_targets() -> None:
    samples = make_samples()
    has_returns = {
        name: estimate(
            AlgorithmConfig(advantage=list_variants(AdvantageEstimator)[name]()),
            samples=samples,
            rewards=REWARDS,
            values=values_for(name, samples),
        ).returns
        is not None
        for name in ESTIMATORS
    }
    assert [name for name, has in has_returns.items() if has] == list(WITH_CRITIC)


def test_kl_penalty_is_subtracted_from_the_reward_of_a_completion() -> None:
    # Rewards 1 and 0; KL sums 2 * 0.5 = 1 and 1 * 0.5 = 0.5, weight 0.4: 1 - 0.4 = 0.6 and 0 - 0.2
    # = -0.2; mean 0.2, so 0.4 and -0.4.
    samples = from_sequences(
        [torch.arange(3), torch.arange(2)],
        loss_masks=[torch.arange(n) >= 1 for n in (3, 2)],
        group_ids=[0, 0],
    )
    config = AlgorithmConfig(advantage=DrGrpo(), kl_reward_coef=0.4)
    estimated = estimate_advantages(
        config, samples=samples, rewards=torch.tensor([1.0, 0.0]), kl=torch.full((5,), 0.5)
    )
    assert estimated.advantages.tolist() == pytest.approx([0.0, 0.4, 0.4, 0.0, -0.4])


def test_gae_subtracts_the_kl_penalty_per_token_with_the_controllers_weight() -> None:
    # Zero values, gamma = lambda = 1: sums to go of (-0.1, -0.3, 1 - 0.2) = 0.4, 0.5, 0.8.
    samples = from_sequences([torch.arange(4)], loss_masks=[torch.arange(4) >= 1])
    kl = torch.tensor([7.0, 0.1, 0.3, 0.2])
    estimated = estimate_advantages(
        AlgorithmConfig(advantage=Gae(), kl_reward_coef=9.0),
        samples=samples,
        rewards=torch.tensor([1.0]),
        values=torch.zeros(4),
        kl=kl,
        kl_coef=1.0,
    )
    assert estimated.advantages.tolist() == pytest.approx([0.0, 0.4, 0.5, 0.8])


def test_whitening_gives_mean_zero_and_std_one_over_trained_tokens() -> None:
    samples = make_samples()
    estimated = estimate_advantages(
        AlgorithmConfig(advantage=Rloo(), whiten_advantages=True), samples=samples, rewards=REWARDS
    )
    trained = estimated.advantages[samples.loss_mask]
    assert float(trained.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(trained.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    assert estimated.metrics["advantage/std"] == pytest.approx(1.0, abs=1e-6)


def test_zero_std_groups_are_counted_and_have_zero_advantage() -> None:
    samples = make_samples(group_ids=(0, 0, 1, 1, 2, 2))
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    estimated = estimate_advantages(
        AlgorithmConfig(advantage=Grpo()), samples=samples, rewards=rewards
    )
    assert estimated.metrics["groups/zero_std_fraction"] == pytest.approx(2 / 3)
    assert not bool(estimated.advantages[: LENGTHS[0] + LENGTHS[1] + LENGTHS[2] + LENGTHS[3]].any())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_step_without_trained_tokens_has_zero_advantages(name: str) -> None:
    samples = from_sequences(
        [torch.arange(3)] * 2,
        loss_masks=[torch.zeros(3, dtype=torch.bool)] * 2,
        group_ids=[0, 0],
        columns={"rollout_logprobs": [torch.zeros(3)] * 2},
    )
    estimated = estimate(
        AlgorithmConfig(advantage=list_variants(AdvantageEstimator)[name]()),
        samples=samples,
        rewards=torch.tensor([1.0, 0.0]),
        values=values_for(name, samples),
    )
    assert estimated.advantages.tolist() == [0.0] * 6


@pytest.mark.parametrize(
    ("config", "rewards", "values", "sentence"),
    [
        (AlgorithmConfig(advantage=Grpo()), [1.0, math.nan], None, "finite numbers"),
        (AlgorithmConfig(advantage=Grpo()), [1.0], None, "one per sample"),
        (AlgorithmConfig(advantage=Gae()), [1.0, 0.0], None, "gae needs the critic's values"),
        (AlgorithmConfig(advantage=Vapo()), [1.0, 0.0], None, "vapo needs the critic's values"),
        (
            AlgorithmConfig(advantage=Rloo()),
            [1.0, 0.0],
            torch.zeros(4),
            "only gae and vapo take them",
        ),
        (AlgorithmConfig(advantage=Gae()), [1.0, 0.0], torch.zeros(3), "one value per token"),
        (
            AlgorithmConfig(advantage=Grpo(), kl_reward_coef=0.1),
            [1.0, 0.0],
            None,
            "kl is missing",
        ),
    ],
)
def test_invalid_inputs_are_refused(
    config: AlgorithmConfig, rewards: list[float], values: torch.Tensor | None, sentence: str
) -> None:
    samples = from_sequences([torch.arange(2)] * 2, loss_masks=[torch.arange(2) >= 1] * 2)
    with pytest.raises(BatchError, match=sentence):
        estimate_advantages(config, samples=samples, rewards=torch.tensor(rewards), values=values)
