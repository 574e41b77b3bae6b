"""Mini-batches with equal work per rank for any number of ranks, full-size or for a rehearsal."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from temper_engine_api.batch import PackedBatch, SequenceBatch, from_sequences
from temper_engine_api.plan import MiniBatchPlan, build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import count_denominators
from tools.gpu.workload import (
    HALF_BILLION,
    LONGEST,
    MICRO_BATCH_TOKENS,
    SHAPES,
    flops_per_token_and_square,
)

Shape = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The device, model shapes and batch sizes of a measurement."""

    device: Literal["cuda", "cpu"]
    shapes: Mapping[str, Shape]
    """Model shapes by name."""
    micro_batch_tokens: int
    """Token limit of a micro-batch."""
    longest: int
    compiles: bool
    """True if the measurement includes torch.compile."""
    num_updates: int
    """Number of timed updates, after the warm-up."""

    @property
    def tokens_per_rank(self) -> int:
        """Number of tokens of one rank in a mini-batch.

        One percent below four full micro-batches, because complete sequences do not fill them
        exactly.
        """
        return int(3.96 * self.micro_batch_tokens)


FULL = Scale(
    device="cuda",
    shapes=SHAPES,
    micro_batch_tokens=MICRO_BATCH_TOKENS,
    longest=LONGEST,
    compiles=True,
    num_updates=8,
)
REHEARSAL = Scale(
    device="cpu",
    shapes={
        name: {
            **HALF_BILLION,
            "vocab_size": 211,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        for name in ("0.5B", "1.5B")
    },
    micro_batch_tokens=512,
    longest=128,
    compiles=False,
    num_updates=2,
)


def _policy_batch(
    lengths: Sequence[int], *, vocabulary: int, generator: torch.Generator
) -> SequenceBatch:
    """Return random tokens; all except the first of each sequence are trained."""
    return from_sequences(
        [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths],
        loss_masks=[torch.arange(n) >= 1 for n in lengths],
        columns={
            "advantages": [torch.randn(n, generator=generator) for n in lengths],
            "old_logprobs": [torch.full((n,), -math.log(vocabulary)) for n in lengths],
        },
    )


def long_tail(scale: Scale, *, copy: int) -> list[int]:
    """Return the sequence lengths of one rank, log-normal with a median of a third of the longest.

    Every copy is the same draw with each length changed by up to a tenth and the same sum. Ranks
    therefore have equal work for any number of ranks, and a plan still has lengths to balance.
    """
    draw, shift = random.Random(1), random.Random(100 + copy)
    shortest, total = scale.longest // 64, scale.tokens_per_rank
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(
            min(
                left,
                scale.longest,
                max(shortest, int(draw.lognormvariate(math.log(scale.longest / 3), 0.9))),
            )
        )
    moved = [
        max(shortest, min(scale.longest, round(length * shift.uniform(0.9, 1.1))))
        for length in lengths
    ]
    # Rounding and the limits changed the sum; move single tokens until it is right again.
    for i in range(10 * scale.longest):
        num_missing = total - sum(moved)
        if num_missing == 0:
            return moved
        step = 1 if num_missing > 0 else -1
        index = i % len(moved)
        moved[index] += step if shortest <= moved[index] + step <= scale.longest else 0
    raise AssertionError("lengths could not be moved to their sum")


def mini_batch(scale: Scale, shape: Shape, *, world_size: int) -> SequenceBatch:
    """Return the mini-batch of all ranks; every rank gets the same."""
    lengths = [length for copy in range(world_size) for length in long_tail(scale, copy=copy)]
    return _policy_batch(
        lengths, vocabulary=shape["vocab_size"], generator=torch.Generator().manual_seed(0)
    )


def plan_batch(scale: Scale, batch: SequenceBatch, *, world_size: int) -> MiniBatchPlan:
    """Plan a mini-batch like the engine's `shard_data`."""
    return plan_mini_batch(
        batch.lengths.tolist(), dp_size=world_size, max_tokens=scale.micro_batch_tokens
    )


def pack_local_batch(
    scale: Scale, batch: SequenceBatch, *, rank: int, world_size: int
) -> PackedBatch:
    """Return the local batch of one rank, for a loop without an engine."""
    plan = plan_batch(scale, batch, world_size=world_size)
    return build_packed_batch(batch, plan=plan, rank=rank, denominators=count_denominators(batch))


def compute_imbalance(
    scale: Scale, shape: Shape, batch: SequenceBatch, *, world_size: int
) -> float:
    """Return the FLOPs of the busiest rank divided by the average over ranks."""
    lengths = batch.lengths.tolist()
    per_token, per_square = flops_per_token_and_square(shape)
    work = [
        sum(
            per_token * lengths[i] + per_square * lengths[i] ** 2
            for micro in rank.micro_batches
            for i in micro
        )
        for rank in plan_batch(scale, batch, world_size=world_size).ranks
    ]
    return float(max(work) * len(work) / sum(work))
