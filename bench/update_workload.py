"""The model, sequences and clock of bench_update.py.

The model has Qwen2's architecture with 18.9 million parameters. The sequences are long-tailed like
rollouts: prompts of 16 to 64 tokens, and responses log-normal with median 90 and sigma 0.9, clipped
to [8, 960]. Only responses are trained.
"""

import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 8192
ARCHITECTURE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NUM_SEQUENCES = 32
MICRO_BATCH_TOKENS = 2048
LEARNING_RATE = 1e-4
# Torch has no public query for the processor's bf16 instructions.
IS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""True if all contenders compute in bf16.

A processor without bf16 instructions computes 50 times slower in bf16 than in float32.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt with its response."""

    tokens: Tensor
    """[L] int64."""
    is_response: Tensor
    """[L] bool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Timings of one contender; the first update is warm-up and appears only in `losses`."""

    tokens: list[int]
    """Real tokens of each timed update, over all ranks."""
    wall_s: list[float]
    """Seconds of each timed update."""
    cpu_s: list[float]
    """CPU seconds of each timed update, over all ranks."""
    losses: list[float]
    """Mean negative log-likelihood per trained token of every update, including the warm-up.

    Empty if the contender's batches differ from those of the others.
    """

    def summary(self) -> dict[str, object]:
        """Return the rates of the median update, and this process's peak memory."""
        per_cpu = sorted(
            tokens / seconds for tokens, seconds in zip(self.tokens, self.cpu_s, strict=True)
        )
        per_wall = sorted(
            tokens / seconds for tokens, seconds in zip(self.tokens, self.wall_s, strict=True)
        )
        return {
            "tokens_per_cpu_s": per_cpu[len(per_cpu) // 2],
            "tokens_per_s": per_wall[len(per_wall) // 2],
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "losses": self.losses,
        }


def draw_examples(*, seed: int) -> list[Example]:
    """Draw the sequences of one update."""
    generator = np.random.default_rng(seed)
    prompts = generator.integers(16, 65, NUM_SEQUENCES)
    responses = np.clip(np.exp(generator.normal(math.log(90), 0.9, NUM_SEQUENCES)), 8, 960).astype(
        int
    )
    return [
        Example(
            tokens=torch.from_numpy(generator.integers(3, VOCAB_SIZE, p + r)),
            is_response=torch.arange(p + r) >= p,
        )
        for p, r in zip(prompts.tolist(), responses.tolist(), strict=True)
    ]


def draw_batches(num_updates: int) -> list[list[Example]]:
    """Return one warm-up batch and `num_updates` timed ones."""
    return [draw_examples(seed=100 + i) for i in range(num_updates + 1)]


def write_model(folder: Path) -> None:
    """Write the model with seeded weights, and a tokenizer that the peers need."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **ARCHITECTURE))
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}, unk_token="t0"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t0"
    ).save_pretrained(folder)


def load_model(folder: Path, *, attention: str) -> PreTrainedModel:
    """Load the model in float32 for training."""
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention
    )
    model.config.use_cache = False
    return model.train()


def time_updates(
    update: Callable[[Sequence[Example]], float], *, num_updates: int, world_size: int = 1
) -> Timing:
    """Run the warm-up and the timed updates; tokens are counted over all ranks."""
    wall, cpu, losses, tokens = [], [], [], []
    for number, batch in enumerate(draw_batches(num_updates)):
        started, started_cpu = time.perf_counter(), time.process_time()
        losses.append(update(batch))
        took, took_cpu = time.perf_counter() - started, time.process_time() - started_cpu
        if number:
            wall.append(took)
            # Ranks have balanced work, so this rank's CPU time is representative of all ranks.
            cpu.append(took_cpu * world_size)
            tokens.append(sum(len(example.tokens) for example in batch))
    return Timing(tokens=tokens, wall_s=wall, cpu_s=cpu, losses=losses)


def pack_first_fit(lengths: Sequence[int], *, cap: int) -> list[list[int]]:
    """Pack sequences into bins of at most `cap` tokens, longest first."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        bin_index = next((b for b, load in enumerate(loads) if load + lengths[index] <= cap), None)
        if bin_index is None:
            bins.append([index])
            loads.append(lengths[index])
        else:
            bins[bin_index].append(index)
            loads[bin_index] += lengths[index]
    return bins
