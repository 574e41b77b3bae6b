"""Samples without an advantage are not run, which changes neither gradient nor loss."""

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.reduction import reduce_loss
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.batching.step_plan import (
    RoleLayout,
    StepPlan,
    drop_zero_advantage_samples,
    find_zero_advantage_samples,
    pack_mini_batch,
    plan_step,
)
from temper_trainer.config.algorithm import BatchingConfig

LAYOUT = RoleLayout(dp_size=2)
LENGTHS = [4, 6, 3, 5, 7, 4]


def make_samples(advantages: list[float]) -> SequenceBatch:
    """Build samples with a constant advantage each; the first token is not trained."""
    masks = [torch.arange(n) >= 1 for n in LENGTHS]
    draw = torch.Generator().manual_seed(0)
    noise = [-torch.rand(n, generator=draw) for n in LENGTHS]
    columns = {
        "advantages": [a * mask for a, mask in zip(advantages, masks, strict=True)],
        "old_logprobs": noise,
    }
    return from_sequences([torch.arange(n) for n in LENGTHS], loss_masks=masks, columns=columns)


def make_plan(samples: SequenceBatch) -> StepPlan:
    return plan_step(samples, BatchingConfig(max_tokens=12), layouts={"actor": LAYOUT}, seed=0)


def update(samples: SequenceBatch, plan: StepPlan) -> tuple[Tensor, Tensor, list[int]]:
    """Return gradient and loss of log-probs old + theta * position, and the run samples."""
    theta = torch.tensor(0.01, requires_grad=True)
    objective, loss, ran = PolicyObjective(), torch.zeros(()), []
    for part in pack_mini_batch(samples, plan.mini_batches[0], "actor", objective=objective):
        for micro in part.iterate_micro_batches():
            logprobs = micro.columns["old_logprobs"] + theta * micro.tokens
            terms = objective(HeadOutputs(columns={HeadOutput.LOGPROB: logprobs}), micro)
            loss = loss + reduce_loss(
                terms, micro, denominators=part.denominators, aggregation=objective.aggregation
            )
        ran += part.sample_ids[~part.is_dummy].tolist()
    (gradient,) = torch.autograd.grad(loss, theta)
    return gradient, loss.detach(), sorted(ran)


def test_sample_is_found_if_all_its_advantages_are_zero() -> None:
    assert find_zero_advantage_samples(make_samples([1.0, 0.0, -1.0, 0.0, 0.0, 0.5])).tolist() == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]


def test_dropping_zero_advantage_samples_changes_neither_gradient_nor_loss() -> None:
    samples = make_samples([1.0, 0.0, -1.0, 0.0, 0.0, 0.5])
    plan = make_plan(samples)
    gradient, loss, ran = update(samples, plan)
    dropped_gradient, dropped_loss, dropped_ran = update(
        samples,
        drop_zero_advantage_samples(plan, samples, role="actor", layout=LAYOUT, max_tokens=12),
    )
    assert (ran, dropped_ran) == ([0, 1, 2, 3, 4, 5], [0, 2, 5])
    torch.testing.assert_close(dropped_gradient, gradient)
    torch.testing.assert_close(dropped_loss, loss)
    assert float(gradient.abs()) > 0.01


def test_mini_batch_of_only_zero_advantage_samples_keeps_one_with_zero_gradient() -> None:
    samples = make_samples([0.0] * 6)
    dropped = drop_zero_advantage_samples(
        make_plan(samples), samples, role="actor", layout=LAYOUT, max_tokens=12
    )
    gradient, _, ran = update(samples, dropped)
    assert (float(gradient), ran) == (0.0, [0])
    assert dropped.mini_batches[0].denominators.sequences == 6
