"""Shapes, batches, an objective, timing and result files of the CUDA measurements."""

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
from temper_engine_api.objective import Aggregation, HeadOutput, HeadOutputs, LossTerms, Objective
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
_QWEN3: Mapping[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_LLAMA_8B: Mapping[str, object] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}
CARDS: Mapping[str, Mapping[str, object]] = {
    "0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "1.7B": {
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "8B": _LLAMA_8B,
    "8B-half": {**_LLAMA_8B, "num_hidden_layers": 16},
}
"""Fields of `config.json` on the public model cards of Qwen/Qwen3-0.6B, Qwen/Qwen3-1.7B,
Qwen/Qwen3-4B and meta-llama/Llama-3.1-8B; `8B-half` is the latter with half of its layers."""
PEAK_FLOPS = 989e12
"""Dense bf16 FLOP/s of an H100 or H200 SXM, from the vendor's data sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedPolicy(Objective):
    """Clipped policy gradient, Schulman et al. 2017, arXiv:1707.06347, equation 7."""

    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Log-probs, with gradient."""
        return frozenset({HeadOutput.LOGPROB})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Compute -min(ratio A, clip(ratio, 0.8, 1.2) A) per token."""
        advantages = batch.columns["advantages"]
        ratio = torch.exp(head_outputs[HeadOutput.LOGPROB] - batch.columns["old_logprobs"])
        return LossTerms(
            loss=-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        )


def characters(prompt: "Prompt", completion: str) -> float:
    """Return the completion's length, a reward that differs even with a random model."""
    del prompt
    return float(len(completion))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A JSON Lines file of results."""

    path: Path

    def add(self, row: dict[str, object]) -> None:
        """Append a row immediately, so that a crashed run keeps its earlier rows."""
        print(json.dumps(row), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def read(self) -> list[dict[str, object]]:
        """Return all rows so far."""
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def small_batch() -> SequenceBatch:
    """Return twelve sequences of 20 to 300 tokens, with old log-probs of a uniform policy."""
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
    """Draw log-normal lengths of four full micro-batches; the median is `LONGEST` / 3."""
    chance = random.Random(1 + rank)
    found = []
    for _ in range(NUM_MICRO_BATCHES):
        sizes: list[int] = []
        while (left := MICRO_BATCH_TOKENS - sum(sizes)) > 0:
            sizes.append(
                min(left, LONGEST, max(64, int(chance.lognormvariate(math.log(LONGEST / 3), 0.9))))
            )
        found.append(sizes)
    return found


def policy_batch(lengths: list[list[int]], *, world_size: int) -> PackedBatch:
    """Build random sequences of these lengths; all tokens but each first one are trained."""
    flat = [size for sizes in lengths for size in sizes]
    whole = from_sequences(
        [torch.randint(0, 151936, (size,)) for size in flat],
        loss_masks=[torch.arange(size) >= 1 for size in flat],
        columns={
            "advantages": [torch.randn(size) for size in flat],
            "old_logprobs": [torch.full((size,), -math.log(151936.0)) for size in flat],
        },
    )
    counts = Denominators(
        tokens=int(whole.loss_mask.sum()) * world_size,
        sequences=len(flat) * world_size,
        groups=len(flat),
    )
    starts = torch.tensor([0, *(len(sizes) for sizes in lengths)]).cumsum(0).int()
    fields = {name: getattr(whole, name) for name in SequenceBatch.__dataclass_fields__}
    return PackedBatch(**fields, micro_batch_starts=starts, denominators=counts)


def flops_of(shape: Mapping[str, int], lengths: list[list[int]]) -> tuple[float, float]:
    """Return FLOPs per token in matrix products and FLOPs of causal attention over `lengths`."""
    per_token, per_square = flops_per_token_and_square(shape)
    return per_token, sum(per_square * size * size for sizes in lengths for size in sizes)


def flops_per_token_and_square(shape: Mapping[str, int]) -> tuple[float, float]:
    """Return the FLOPs of an update per token and per squared sequence length.

    Per token: 6 x weights in matrix products, head included, embedding look-up excluded (Kaplan et
    al. 2020, arXiv:2001.08361, section 2.1). Per squared length: 6 x layers x heads x head_dim,
    half of unmasked attention because a causal mask skips half (Dao 2023, arXiv:2307.08691,
    section 4.1). Recomputed operations are not counted, as in model FLOPs utilization (Chowdhery
    et al. 2022, arXiv:2204.02311, appendix B).
    """
    hidden, layers, heads = (
        shape[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    head_dim = shape.get("head_dim", hidden // heads)
    attention = 2 * hidden * head_dim * (heads + shape["num_key_value_heads"])
    layer = attention + 3 * hidden * shape["intermediate_size"]
    weights = layers * layer + shape["vocab_size"] * hidden
    return 6.0 * weights, 6.0 * heads * head_dim * layers


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
    """Report the tokens/s per GPU of the median update, and its fraction of the matmul rate."""
    for _ in range(3):
        norm = once()
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(once, repeats=6)
    tokens = sum(map(sum, lengths))
    per_token, attention = flops_of(SHAPES[shape], lengths)
    if rank == 0:
        rows.add(
            {
                "job": "update",
                "who": name,
                "shape": shape,
                "world_size": world_size,
                "tokens_per_s": round(tokens / seconds),
                "mfu": round((per_token * tokens + attention) / seconds / gemm, 3),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
                "grad_norm": norm,
                "ok": math.isfinite(norm),
            }
        )


def timed(once: Callable[[], object], *, repeats: int) -> float:
    """Return the median seconds of a call, including the device's work."""
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        once()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def gemm_rate() -> float:
    """Measure the FLOP/s of a large bf16 matmul."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timed(lambda: a @ b, repeats=5)
    return 2 * 8192**3 / timed(lambda: a @ b, repeats=20)
