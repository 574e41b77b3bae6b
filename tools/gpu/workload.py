"""Shapes, batches, an objective, updates and result files of the CUDA measurements."""

import json
import math
import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from temper_engine_api.batch import Denominators, PackedBatch, SequenceBatch, from_sequences
from temper_engine_api.checkpoint import set_aside
from temper_engine_api.engine import BaseEngine
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
_QWEN3_30B_A3B: Mapping[str, object] = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
CARDS: Mapping[str, Mapping[str, object]] = {
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        **HALF_BILLION,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
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
    "30B-A3B-4L": {**_QWEN3_30B_A3B, "num_hidden_layers": 4},
    "30B-A3B-12L": {**_QWEN3_30B_A3B, "num_hidden_layers": 12},
    "8B": _LLAMA_8B,
    "8B-half": {**_LLAMA_8B, "num_hidden_layers": 16},
}
"""Fields of `config.json` on the public model cards of Qwen/Qwen3-0.6B, Qwen/Qwen3-1.7B,
Qwen/Qwen3-4B, Qwen/Qwen3-30B-A3B and meta-llama/Llama-3.1-8B. `30B-A3B-4L` and
`30B-A3B-12L` have 4 and 12 of its 48 layers, `8B-half` half of the layers."""
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


def count_characters(prompt: "Prompt", completion: str) -> float:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJobs:
    """The jobs that succeeded, in a file, so that the same command continues after an interruption.

    A job is a name and the settings that its results depend on.
    """

    path: Path

    def add(self, *job: object) -> None:
        """Append a job that succeeded."""
        with self.path.open("a") as file:
            file.write(json.dumps(job) + "\n")

    def contain(self, *job: object) -> bool:
        """Return True, and print that it is left out, if a job has succeeded before."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        is_finished = json.dumps(job) in lines
        if is_finished:
            print(f"{job[0]}: left out, because it is in {self.path}", flush=True)
        return is_finished


def set_aside_run(folder: Path) -> None:
    """Rename the folder of an interrupted run, if there is one, to ``NAME.superseded-N``.

    For runs whose times are the result: one that continued would warm up twice.
    """
    if folder.exists():
        renamed = set_aside(folder, "superseded")
        print(f"{folder} is of an earlier run: renamed to {renamed.name}", flush=True)


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
    generator = random.Random(1 + rank)
    micro_batches = []
    for _ in range(NUM_MICRO_BATCHES):
        sizes: list[int] = []
        while (left := MICRO_BATCH_TOKENS - sum(sizes)) > 0:
            sizes.append(
                min(
                    left,
                    LONGEST,
                    max(64, int(generator.lognormvariate(math.log(LONGEST / 3), 0.9))),
                )
            )
        micro_batches.append(sizes)
    return micro_batches


def policy_batch(lengths: list[list[int]], *, world_size: int) -> PackedBatch:
    """Build random sequences of these lengths; all tokens but each first one are trained."""
    flat = [size for sizes in lengths for size in sizes]
    batch = from_sequences(
        [torch.randint(0, 151936, (size,)) for size in flat],
        loss_masks=[torch.arange(size) >= 1 for size in flat],
        columns={
            "advantages": [torch.randn(size) for size in flat],
            "old_logprobs": [torch.full((size,), -math.log(151936.0)) for size in flat],
        },
    )
    counts = Denominators(
        tokens=int(batch.loss_mask.sum()) * world_size,
        sequences=len(flat) * world_size,
        groups=len(flat),
    )
    starts = torch.tensor([0, *(len(sizes) for sizes in lengths)]).cumsum(0).int()
    fields = {name: getattr(batch, name) for name in SequenceBatch.__dataclass_fields__}
    return PackedBatch(**fields, micro_batch_starts=starts, denominators=counts)


def compute_flops(shape: Mapping[str, int], lengths: list[list[int]]) -> tuple[float, float]:
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
    if "num_experts" in shape:
        # A token's chosen experts and the router.
        width = shape["moe_intermediate_size"] * shape["num_experts_per_tok"]
        layer = attention + hidden * (3 * width + shape["num_experts"])
    else:
        layer = attention + 3 * hidden * shape["intermediate_size"]
    weights = layers * layer + shape["vocab_size"] * hidden
    return 6.0 * weights, 6.0 * heads * head_dim * layers


def run_update(
    engine: BaseEngine, batch: PackedBatch, outputs: tuple[HeadOutput, ...] = ()
) -> float:
    """Run one update that also computes these outputs, and return the gradient norm."""
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(batch, forward_only=False, outputs=outputs)
    return engine.optimizer_step()


def find_free_port() -> int:
    """Return a TCP port of this host that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def set_rank_variables(rank: int, *, world_size: int, port: int) -> None:
    """Set the variables from which torch.distributed reads rank and rendezvous."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
