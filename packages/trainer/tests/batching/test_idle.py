"""Samples without advantage are not run, and nothing that is learnt changes."""

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.objective import Answers, Query
from temper_engine_api.reduction import reduce_loss
from temper_trainer.algorithms.policy_loss import PolicyObjective
from temper_trainer.batching.idle import idle_samples, without_idle
from temper_trainer.batching.packing import pack
from temper_trainer.batching.step_plan import RoleLayout, StepPlan, plan_step
from temper_trainer.config.algorithm import BatchingConfig

LAYOUT = RoleLayout(dp_size=2)
LENGTHS = [4, 6, 3, 5, 7, 4]


def samples_of(advantages: list[float]) -> SequenceBatch:
    """One advantage per sample, on every token but its first; the column x stands for log-probs."""
    masks = [torch.arange(n) >= 1 for n in LENGTHS]
    draw = torch.Generator().manual_seed(0)
    noise = [-torch.rand(n, generator=draw) for n in LENGTHS]
    columns = {
        "advantages": [a * mask for a, mask in zip(advantages, masks, strict=True)],
        "old_logprobs": noise,
    }
    return from_sequences([torch.arange(n) for n in LENGTHS], loss_masks=masks, columns=columns)


def plan_of(samples: SequenceBatch) -> StepPlan:
    return plan_step(samples, BatchingConfig(max_tokens=12), topologies={"actor": LAYOUT}, seed=0)


def update(samples: SequenceBatch, plan: StepPlan) -> tuple[Tensor, Tensor, list[int]]:
    """Gradient and loss of log-probs old + theta * position, and the samples that were run."""
    theta = torch.tensor(0.01, requires_grad=True)
    objective, loss, ran = PolicyObjective(), torch.zeros(()), []
    for part in pack(samples, plan.mini_batches[0], "actor", objective=objective):
        for micro in part.micro_batches():
            logprobs = micro.columns["old_logprobs"] + theta * micro.tokens
            terms = objective(Answers(columns={Query.LOGPROB: logprobs}), micro)
            loss = loss + reduce_loss(
                terms, micro, denominators=part.denominators, aggregation=objective.aggregation
            )
        ran += part.sample_ids[~part.is_dummy].tolist()
    (gradient,) = torch.autograd.grad(loss, theta)
    return gradient, loss.detach(), sorted(ran)


def test_a_sample_is_idle_where_every_advantage_is_zero() -> None:
    assert idle_samples(samples_of([1.0, 0.0, -1.0, 0.0, 0.0, 0.5])).tolist() == [
        False,
        True,
        False,
        True,
        True,
        False,
    ]


def test_leaving_idle_samples_out_changes_neither_gradient_nor_loss() -> None:
    samples = samples_of([1.0, 0.0, -1.0, 0.0, 0.0, 0.5])
    plan = plan_of(samples)
    gradient, loss, ran = update(samples, plan)
    thin_gradient, thin_loss, thin_ran = update(
        samples, without_idle(plan, samples, role="actor", layout=LAYOUT, max_tokens=12)
    )
    assert (ran, thin_ran) == ([0, 1, 2, 3, 4, 5], [0, 2, 5])
    torch.testing.assert_close(thin_gradient, gradient)
    torch.testing.assert_close(thin_loss, loss)
    assert float(gradient.abs()) > 0.01


def test_a_mini_batch_of_idle_samples_alone_keeps_one_and_its_gradient_of_zero() -> None:
    samples = samples_of([0.0] * 6)
    thin = without_idle(plan_of(samples), samples, role="actor", layout=LAYOUT, max_tokens=12)
    gradient, _, ran = update(samples, thin)
    assert (float(gradient), ran) == (0.0, [0])
    assert thin.mini_batches[0].denominators.sequences == 6
