"""Old losses and advantages by import path.

The trainer builds them, and their numbers are those of the old formulas.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("temper_trainer", reason="needs temper-trainer")

from temper_engine_api.batch import from_sequences
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_legacy_shim.numerics.policy_losses import PolicyInputs, PolicyLossSettings, policy_loss
from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
from temper_trainer.algorithms.objectives.objective_factory import build_policy_objective
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.settings.variants import Custom

HERE = "temper_legacy_shim.old_algorithms"
NUM_TOKENS = 64


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs, old log-probs and advantages [T] that reach every branch."""
    generator = torch.Generator().manual_seed(seed)
    new = -3 * torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64)
    old = -3 * torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64)
    return new, old, torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)


def target(
    config: AlgorithmConfig, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Return the mean loss per trained token, and its gradient in the log-probs."""
    batch = from_sequences([torch.arange(NUM_TOKENS)], loss_masks=[torch.arange(NUM_TOKENS) > 0])
    mask = batch.loss_mask
    batch = replace(batch, columns={"advantages": advantages, "old_logprobs": old})
    leaf = new.clone().requires_grad_()
    loss = build_policy_objective(config)(
        HeadOutputs(columns={HeadOutput.LOGPROB: leaf}), batch
    ).loss
    mean = loss[mask].sum() / mask.sum()
    (gradient,) = torch.autograd.grad(mean, leaf)
    return float(mean.detach()), gradient


def others(
    settings: PolicyLossSettings, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> tuple[float, torch.Tensor]:
    leaf = new.clone().requires_grad_()
    mask = torch.ones(1, NUM_TOKENS, dtype=torch.float64)
    mask[0, 0] = 0  # nothing predicts a sequence's first token
    loss, _ = policy_loss(settings.loss_mode)(
        PolicyInputs(
            logprobs=leaf[None], old_logprobs=old[None], advantages=advantages[None], mask=mask
        ),
        settings,
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient


@pytest.mark.parametrize(
    ("old_name", "new_name", "arguments"),
    [
        ("gpg", "PlainGradient", {}),
        (
            "dppo_tv",
            "WithinDivergence",
            {"distance": "tv", "low": 0.15, "high": 0.1, "max_ratio": 2.0},
        ),
        (
            "dppo_kl",
            "WithinDivergence",
            {"distance": "kl", "low": 0.15, "high": 0.1, "max_ratio": 2.0},
        ),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_an_old_loss_has_its_old_value_and_gradient(
    old_name: str, new_name: str, arguments: dict[str, str | float], seed: int
) -> None:
    new, old, advantages = rows(seed)
    config = AlgorithmConfig(policy_loss=Custom(name=f"{HERE}:{new_name}", arguments=arguments))
    settings = PolicyLossSettings(
        loss_mode=old_name, clip_low=0.15, clip_high=0.1, clip_ratio_c=2.0
    )
    own, my_gradient = target(config, new, old, advantages)
    other, other_gradient = others(settings, new, old, advantages)
    assert own == pytest.approx(other, rel=1e-6)
    torch.testing.assert_close(my_gradient, other_gradient, rtol=1e-6, atol=1e-9)
    assert (my_gradient == 0).sum() > 1 or old_name == "gpg"  # some tokens were dropped


def test_a_completion_only_has_its_bare_reward_as_advantage() -> None:
    samples = from_sequences(
        [torch.arange(n) for n in (3, 2)], loss_masks=[torch.arange(n) > 0 for n in (3, 2)]
    )
    config = AlgorithmConfig(advantage=Custom(name=f"{HERE}:bare_reward"), group_size=1)
    result = estimate_advantages(
        config, samples=samples, rewards=torch.tensor([4.0, -2.0])
    ).advantages
    assert result.tolist() == [0.0, 4.0, 4.0, 0.0, -2.0]
