"""What the CUDA measurements run and how they time it: shapes, batches, an objective, rows of results."""

import json
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from temper_engine_api.batch import Denominators, PackedBatch, SequenceBatch, from_sequences
from temper_engine_api.objective import Aggregation, Answers, LossTerms, Objective, Query
from temper_engine_api.specs import Scalar

if TYPE_CHECKING:
    from temper_trainer.types import Prompt

SMALL: Mapping[str, Scalar] = {
    "model_type": "qwen2",
    "vocab_size": 1009,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
HALF_BILLION = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
ONE_AND_A_HALF_BILLION = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
SHAPES: Mapping[str, Mapping[str, int]] = {"0.5B": HALF_BILLION, "1.5B": ONE_AND_A_HALF_BILLION}
MICRO_BATCH_TOKENS, NUM_MICRO_BATCHES, LONGEST = 16384, 4, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedPolicy(Objective):
    """Clipped policy gradient, Schulman et al. 2017, arXiv:1707.06347, equation 7."""

    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def needs(self) -> frozenset[Query]:
        """Log-probs with gradient."""
        return frozenset({Query.LOGPROB})

    def __call__(self, answers: Answers, batch: SequenceBatch) -> LossTerms:
        """-min(ratio A, clip(ratio) A)."""
        advantages = batch.columns["advantages"]
        ratio = torch.exp(answers[Query.LOGPROB] - batch.columns["old_logprobs"])
        return LossTerms(loss=-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))


def characters(prompt: "Prompt", completion: str) -> float:
    """A reward that differs between completions of a random model: how much of one is text."""
    del prompt
    return float(len(completion))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The file of results."""

    path: Path

    def add(self, row: dict[str, object]) -> None:
        """Append a row at once, so that a run that dies leaves what it measured."""
        print(json.dumps(row), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def read(self) -> list[dict[str, object]]:
        """All rows so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def small_batch() -> SequenceBatch:
    """Twelve sequences of 20 to 300 tokens; policy-gradient columns whose old log-probs are those of a uniform policy."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 300, (12,), generator=generator).tolist()
    return from_sequences(
        [torch.randint(0, 1009, (n,), generator=generator) for n in lengths],
        loss_masks=[torch.arange(n) >= 8 for n in lengths],
        temperature=[0.7 + 0.05 * i for i in range(12)],
        columns={
            "advantages": [torch.randn(n, generator=generator) for n in lengths],
            "old_logprobs": [torch.full((n,), -math.log(1009.0)) for n in lengths],
        },
    )


def long_tail(rank: int) -> list[list[int]]:
    """Lengths of four micro-batches that are exactly full; log-normal with a median of a third of the longest."""
    chance = random.Random(1 + rank)
    found = []
    for _ in range(NUM_MICRO_BATCHES):
        sizes: list[int] = []
        while (left := MICRO_BATCH_TOKENS - sum(sizes)) > 0:
            sizes.append(min(left, LONGEST, max(64, int(chance.lognormvariate(math.log(LONGEST / 3), 0.9)))))
        found.append(sizes)
    return found


def policy_batch(lengths: list[list[int]], *, world_size: int) -> PackedBatch:
    """Random tokens in that plan; every token with a predecessor is trained."""
    flat = [size for sizes in lengths for size in sizes]
    whole = from_sequences(
        [torch.randint(0, 151936, (size,)) for size in flat],
        loss_masks=[torch.arange(size) >= 1 for size in flat],
        columns={
            "advantages": [torch.randn(size) for size in flat],
            "old_logprobs": [torch.full((size,), -math.log(151936.0)) for size in flat],
        },
    )
    counts = Denominators(tokens=int(whole.loss_mask.sum()) * world_size, sequences=len(flat) * world_size, groups=len(flat))
    starts = torch.tensor([0, *(len(sizes) for sizes in lengths)]).cumsum(0).int()
    fields = {name: getattr(whole, name) for name in SequenceBatch.__dataclass_fields__}
    return PackedBatch(**fields, micro_batch_starts=starts, denominators=counts)


def flops_of(shape: Mapping[str, int], lengths: list[list[int]]) -> tuple[float, float]:
    """Of an update: in matrix products per token, head included, and in causal attention over these sequences.

    6 for each weight and token; 6 x s^2 x heads x head_dim for each layer and sequence, half of what attention without a mask takes.
    Recomputation is not counted, and neither is the embedding.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * shape["intermediate_size"]
    weights = layers * layer + shape["vocab_size"] * hidden
    return 6.0 * weights, float(sum(6 * size * size * hidden * layers for sizes in lengths for size in sizes))


def report_speed(
    rows: Rows,
    once: Callable[[], float],
    *,
    name: str,
    rank: int,
    world_size: int,
    gemm: float,
    lengths: list[list[int]],
    shape: str = "0.5B",
) -> None:
    """Median tokens per second and GPU of six updates, and the share of the matmul rate they use."""
    for _ in range(3):
        norm = once()
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(once, repeats=6)
    tokens = sum(map(sum, lengths))
    per_token, attention = flops_of(SHAPES[shape], lengths)
    if rank == 0:
        rows.add({
            "job": "update", "who": name, "shape": shape, "world_size": world_size, "tokens_per_s": round(tokens / seconds),
            "mfu": round((per_token * tokens + attention) / seconds / gemm, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1), "grad_norm": norm, "ok": math.isfinite(norm),
        })  # fmt: skip


def timed(once: Callable[[], object], *, repeats: int) -> float:
    """Median seconds of a call, device included."""
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        once()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def gemm_rate() -> float:
    """FLOP per second of a large bf16 matmul, measured now."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timed(lambda: a @ b, repeats=5)
    return 2 * 8192**3 / timed(lambda: a @ b, repeats=20)
