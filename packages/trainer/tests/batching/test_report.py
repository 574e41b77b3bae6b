"""A plan in numbers and in words."""

import pytest
import torch

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_trainer.batching.report import describe, plan_metrics
from temper_trainer.batching.step_plan import RoleLayout, plan_step
from temper_trainer.config.algorithm import BatchingConfig


def samples_of(*lengths: int) -> SequenceBatch:
    return from_sequences(
        [torch.arange(n) for n in lengths], loss_masks=[torch.arange(n) >= 1 for n in lengths]
    )


def test_sizes_are_those_of_one_pass() -> None:
    # Two ranks get 6 and 2 tokens: the fullest has 6 over a mean of 4, imbalance 0.5. One micro-batch each, no dummy.
    samples = samples_of(6, 2)
    plan = plan_step(
        samples,
        BatchingConfig(num_passes=3, max_tokens=8),
        topologies={"actor": RoleLayout(dp_size=2)},
        seed=0,
    )
    assert plan_metrics(plan, samples, role="actor") == pytest.approx(
        {
            "batch/tokens": 8,
            "batch/trained_tokens": 6,
            "batch/updates": 3,
            "batch/micro_batches": 1,
            "batch/dummy_share": 0,
            "batch/imbalance": 0.5,
        }
    )


def test_micro_batches_that_hold_only_a_dummy_are_counted() -> None:
    # One sample on four ranks: three of four micro-batches hold a dummy; 5 tokens over a mean of 1.25 is 3 above 1.
    samples = samples_of(5)
    plan = plan_step(
        samples, BatchingConfig(max_tokens=8), topologies={"actor": RoleLayout(dp_size=4)}, seed=0
    )
    metrics = plan_metrics(plan, samples, role="actor")
    assert (metrics["batch/dummy_share"], metrics["batch/imbalance"]) == (0.75, 3.0)


def test_the_description_names_sizes_and_shows_equal_layouts_once() -> None:
    samples = samples_of(6, 2, 4)
    layouts = {"actor": RoleLayout(dp_size=2), "ref": RoleLayout(dp_size=2), "critic": RoleLayout()}
    text = describe(
        plan_step(samples, BatchingConfig(num_passes=2, max_tokens=12), topologies=layouts, seed=0),
        samples,
    )
    assert "3 samples of 12 tokens; 2 updates (2 passes of 1 mini-batches)" in text
    assert "9 trained tokens of 12, 3 sequences, 3 groups" in text
    assert "actor, ref:" in text
    assert "critic:" in text
