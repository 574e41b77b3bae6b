from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import BatchError
from temper_engine_api.objective import Aggregation, HeadOutput, HeadOutputs, LossTerms, Objective
from temper_trainer.batching.step_plan import MiniBatch, RoleLayout, pack_mini_batch, plan_step
from temper_trainer.config.algorithm import BatchingConfig

LENGTHS = [5, 3, 8, 2, 6, 4, 7]


@dataclass(frozen=True, slots=True, kw_only=True)
class Centered(Objective):
    """Subtracts a column's mean over the mini-batch, which only ``prepare`` can compute."""

    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB})

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({"weight"})

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        return {
            "centered": batch.columns["weight"] - batch.columns["weight"].mean(),
            "seed": torch.full((batch.num_tokens,), seed % 1000),
        }

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        return LossTerms(loss=head_outputs[HeadOutput.LOGPROB] * batch.columns["centered"])


def samples_with_weight() -> SequenceBatch:
    weight = torch.arange(sum(LENGTHS), dtype=torch.float32)
    columns = {"weight": weight.split(LENGTHS), "rollout_logprobs": weight.split(LENGTHS)}
    return from_sequences(
        [torch.arange(n) + 10 * n for n in LENGTHS],
        loss_masks=[torch.arange(n) >= 1 for n in LENGTHS],
        columns=columns,
    )


def plan_single_mini_batch(
    samples: SequenceBatch, *, dp_size: int, max_tokens: int = 8
) -> MiniBatch:
    layouts = {"actor": RoleLayout(dp_size=dp_size)}
    (mini_batch,) = plan_step(
        samples, BatchingConfig(max_tokens=max_tokens), layouts=layouts, seed=3
    ).mini_batches
    return mini_batch


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_sample_is_on_exactly_one_rank_and_unchanged(dp_size: int) -> None:
    samples = samples_with_weight()
    parts = pack_mini_batch(
        samples, plan_single_mini_batch(samples, dp_size=dp_size), "actor", objective=Centered()
    )
    assert len(parts) == dp_size
    received = {}
    for part in parts:
        for b in torch.nonzero(~part.is_dummy)[:, 0].tolist():
            one = part.select([b])
            received[int(one.sample_ids)] = (one.tokens.tolist(), one.columns["weight"].tolist())
    expected = {
        b: (samples.select([b]).tokens.tolist(), samples.select([b]).columns["weight"].tolist())
        for b in range(len(LENGTHS))
    }
    assert received == expected


def test_every_rank_gets_the_denominators_of_the_full_mini_batch() -> None:
    # 35 tokens, 7 of them the first of their sequence: 28 trained.
    samples = samples_with_weight()
    parts = pack_mini_batch(samples, plan_single_mini_batch(samples, dp_size=2), "actor")
    assert [part.denominators.tokens for part in parts] == [28, 28]


def test_prepare_gets_the_full_mini_batch_and_its_seed() -> None:
    # Weights are 0 to 34: mean 17.
    samples = samples_with_weight()
    mini_batch = plan_single_mini_batch(samples, dp_size=2)
    for part in pack_mini_batch(samples, mini_batch, "actor", objective=Centered()):
        kept = ~part.is_dummy[part.sequence_index]
        assert torch.equal(part.columns["centered"][kept], part.columns["weight"][kept] - 17.0)
        assert set(part.columns["seed"][kept].tolist()) == {mini_batch.seed % 1000}


def test_workers_get_only_the_columns_that_their_objective_reads() -> None:
    samples = samples_with_weight()
    mini_batch = plan_single_mini_batch(samples, dp_size=1)
    assert set(pack_mini_batch(samples, mini_batch, "actor", objective=Centered())[0].columns) == {
        "weight",
        "centered",
        "seed",
    }
    assert not pack_mini_batch(samples, mini_batch, "actor")[0].columns


def test_only_the_actor_gets_the_experts_that_the_sampler_chose() -> None:
    samples = samples_with_weight()
    experts = torch.zeros(samples.num_tokens, 2, 3, dtype=torch.int16)
    samples = samples.with_columns({"routed_experts": experts})
    layouts = {role: RoleLayout() for role in ("actor", "critic")}
    (mini_batch,) = plan_step(
        samples, BatchingConfig(max_tokens=8), layouts=layouts, seed=3
    ).mini_batches
    for objective in (None, Centered()):
        (actor,), (critic,) = (
            pack_mini_batch(samples, mini_batch, role, objective=objective) for role in layouts
        )
        assert actor.columns["routed_experts"].shape[1:] == (2, 3)
        assert "routed_experts" not in critic.columns


def test_missing_column_is_named() -> None:
    samples = from_sequences(
        [torch.arange(3)], loss_masks=[torch.arange(3) >= 1], columns={"other": [torch.zeros(3)]}
    )

    class Unprepared(Centered):
        def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
            return {}

    Unprepared.name = "unprepared"
    with pytest.raises(
        BatchError, match="'unprepared' reads columns that the samples lack: weight"
    ):
        pack_mini_batch(
            samples, plan_single_mini_batch(samples, dp_size=1), "actor", objective=Unprepared()
        )


def test_ranks_without_samples_get_untrained_dummies() -> None:
    samples = samples_with_weight().select([0, 1])
    parts = pack_mini_batch(samples, plan_single_mini_batch(samples, dp_size=3), "actor")
    assert sorted(int((~part.is_dummy).sum()) for part in parts) == [0, 1, 1]
    assert sum(int(part.loss_mask.sum()) for part in parts) == parts[0].denominators.tokens == 6
