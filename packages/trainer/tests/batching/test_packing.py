"""What the workers of a role get."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import BatchError
from temper_engine_api.objective import Aggregation, Answers, LossTerms, Objective, Query
from temper_trainer.batching.packing import pack
from temper_trainer.batching.step_plan import MiniBatch, RoleLayout, plan_step
from temper_trainer.config.algorithm import BatchingConfig

LENGTHS = [5, 3, 8, 2, 6, 4, 7]


@dataclass(frozen=True, slots=True, kw_only=True)
class Centred(Objective):
    """Reads a column less its mean over the mini-batch, which only ``prepare`` can know."""

    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def needs(self) -> frozenset[Query]:
        return frozenset({Query.LOGPROB})

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({"weight"})

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        return {
            "centred": batch.columns["weight"] - batch.columns["weight"].mean(),
            "seed": torch.full((batch.num_tokens,), seed % 1000),
        }

    def __call__(self, answers: Answers, batch: SequenceBatch) -> LossTerms:
        return LossTerms(loss=answers[Query.LOGPROB] * batch.columns["centred"])


def samples_with_weight() -> SequenceBatch:
    weight = torch.arange(sum(LENGTHS), dtype=torch.float32)
    columns = {"weight": weight.split(LENGTHS), "rollout_logprobs": weight.split(LENGTHS)}
    return from_sequences(
        [torch.arange(n) + 10 * n for n in LENGTHS],
        loss_masks=[torch.arange(n) >= 1 for n in LENGTHS],
        columns=columns,
    )


def only_mini_batch(samples: SequenceBatch, *, dp_size: int, max_tokens: int = 8) -> MiniBatch:
    layouts = {"actor": RoleLayout(dp_size=dp_size)}
    (mini_batch,) = plan_step(
        samples, BatchingConfig(max_tokens=max_tokens), topologies=layouts, seed=3
    ).mini_batches
    return mini_batch


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_sample_arrives_on_exactly_one_rank_as_it_was(dp_size: int) -> None:
    samples = samples_with_weight()
    parts = pack(samples, only_mini_batch(samples, dp_size=dp_size), "actor", objective=Centred())
    assert len(parts) == dp_size
    arrived = {}
    for part in parts:
        for b in torch.nonzero(~part.is_dummy)[:, 0].tolist():
            one = part.select([b])
            arrived[int(one.sample_ids)] = (one.tokens.tolist(), one.columns["weight"].tolist())
    expected = {
        b: (samples.select([b]).tokens.tolist(), samples.select([b]).columns["weight"].tolist())
        for b in range(len(LENGTHS))
    }
    assert arrived == expected


def test_the_denominators_of_the_whole_mini_batch_travel_with_every_rank() -> None:
    # 35 tokens, 7 of them the first of their sequence: 28 trained.
    samples = samples_with_weight()
    parts = pack(samples, only_mini_batch(samples, dp_size=2), "actor")
    assert [part.denominators.tokens for part in parts] == [28, 28]


def test_prepare_sees_the_whole_mini_batch_and_its_seed() -> None:
    # Weights are 0 to 34: mean 17.
    samples = samples_with_weight()
    mini_batch = only_mini_batch(samples, dp_size=2)
    for part in pack(samples, mini_batch, "actor", objective=Centred()):
        kept = ~part.is_dummy[part.sequence_index]
        assert torch.equal(part.columns["centred"][kept], part.columns["weight"][kept] - 17.0)
        assert set(part.columns["seed"][kept].tolist()) == {mini_batch.seed % 1000}


def test_workers_get_the_columns_their_objective_reads_and_no_others() -> None:
    samples = samples_with_weight()
    mini_batch = only_mini_batch(samples, dp_size=1)
    assert set(pack(samples, mini_batch, "actor", objective=Centred())[0].columns) == {
        "weight",
        "centred",
        "seed",
    }
    assert not pack(samples, mini_batch, "actor")[0].columns


def test_a_column_that_the_objective_reads_and_nobody_made_is_named() -> None:
    samples = from_sequences(
        [torch.arange(3)], loss_masks=[torch.arange(3) >= 1], columns={"other": [torch.zeros(3)]}
    )

    class Unprepared(Centred):
        def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
            return {}

    Unprepared.name = "unprepared"
    with pytest.raises(
        BatchError, match="'unprepared' reads columns that the samples lack: weight"
    ):
        pack(samples, only_mini_batch(samples, dp_size=1), "actor", objective=Unprepared())


def test_more_ranks_than_samples_leaves_dummies_that_train_nothing() -> None:
    samples = samples_with_weight().select([0, 1])
    parts = pack(samples, only_mini_batch(samples, dp_size=3), "actor")
    assert sorted(int((~part.is_dummy).sum()) for part in parts) == [0, 1, 1]
    assert sum(int(part.loss_mask.sum()) for part in parts) == parts[0].denominators.tokens == 6
