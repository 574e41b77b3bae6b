"""Compare rollout throughput on the CPU: hf sampler, `generate` and continuous batching.

    python bench/bench_rollout.py [--repeats 3] [--json FILE] [--only NAME]

All contenders get 32 prompts and sample a fixed number of tokens for each at temperature 1. The
numbers are log-normal, as in a rollout whose completions differ in length. Reports tokens per
CPU-second with one thread; each contender runs in a separate process.
"""

import argparse
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from temper_engine_api.specs import ModelSpec
from temper_trainer.config.rollout import RolloutConfig, SamplingConfig
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.types import SamplingRequest

VOCAB_SIZE = 8192
ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
NUM_PROMPTS = 32
CONTENDERS = ("temper hf sampler", "generate, one padded batch", "transformers continuous batching")

Contender = Callable[[], int]
"""Generates all completions and returns the number of requested tokens."""


def make_workload() -> tuple[list[list[int]], list[int]]:
    """Return prompts of 16 to 64 random tokens, and numbers of new tokens (median 60, max. 384)."""
    generator = np.random.default_rng(7)
    prompt_lengths = generator.integers(16, 65, NUM_PROMPTS)
    lengths = np.clip(np.exp(generator.normal(math.log(60), 0.9, NUM_PROMPTS)), 8, 384).astype(int)
    prompts = [generator.integers(3, VOCAB_SIZE, length).tolist() for length in prompt_lengths]
    return prompts, lengths.tolist()


def make_temper() -> Contender:
    """Build the hf sampler.

    Its end token is outside the model's vocabulary and therefore never drawn, so lengths are exact.
    """
    words = Tokenizer(
        models.WordLevel(
            {f"t{i}": i for i in range(VOCAB_SIZE)} | {"<eos>": VOCAB_SIZE}, unk_token="t0"
        )
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    sampler = HfSampler(
        model=ModelSpec(architecture=ARCHITECTURE),
        tokenizer=tokenizer,
        config=RolloutConfig(dtype="bf16"),
        device="cpu",
    )
    prompts, lengths = make_workload()
    requests = [
        SamplingRequest(
            request_id=i,
            prompt_tokens=tuple(prompt),
            sampling=SamplingConfig(max_tokens=length),
            seed=i,
        )
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    return lambda: sum(len(completion.tokens) for completion in sampler.sample(requests))


class StopAtLengths(StoppingCriteria):  # type: ignore[misc]
    """Ends row i of the batch after lengths[i] new tokens."""

    def __init__(self, lengths: Sequence[int], *, prompt_length: int) -> None:
        self._lengths = torch.tensor(lengths)
        self._prompt_length = prompt_length

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        """Return a [B] bool mask of finished rows."""
        return input_ids.shape[1] - self._prompt_length >= self._lengths


def build_model() -> PreTrainedModel:
    """Build the peers' model: same architecture, seed and dtype, with SDPA attention."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**ARCHITECTURE)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    assert isinstance(model, PreTrainedModel)
    return model


def make_padded_generate() -> Contender:
    """Build a run of `generate` over one batch padded on the left."""
    model, (prompts, lengths) = build_model(), make_workload()
    longest = max(map(len, prompts))
    inputs = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ends = StoppingCriteriaList([StopAtLengths(lengths, prompt_length=longest)])
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=max(lengths),
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )

    def run() -> int:
        with torch.no_grad():
            model.generate(
                input_ids=inputs,
                attention_mask=mask,
                generation_config=settings,
                stopping_criteria=ends,
            )
        return sum(lengths)

    return run


def make_continuous_batching() -> Contender:
    """Build a run of transformers' continuous batching with a cache that fits the work.

    By default the cache takes most of the free memory.
    """
    model, (prompts, lengths) = build_model(), make_workload()
    settings = GenerationConfig(
        max_new_tokens=max(lengths),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        # A token that is never sampled: requests end at their number of tokens.
        eos_token_id=-1,
        pad_token_id=0,
    )

    cache = ContinuousBatchingConfig(
        num_blocks=3 * NUM_PROMPTS, block_size=256, max_batch_tokens=2048
    )

    def run() -> int:
        num_tokens = num_done = 0
        with model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=cache
        ) as manager:
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                manager.add_request(prompt, request_id=str(i), max_new_tokens=length)
            while num_done < len(prompts):
                output = manager.get_result(timeout=5)
                if output is not None and output.is_finished():
                    num_done, num_tokens = num_done + 1, num_tokens + len(output.generated_tokens)
                elif output is None and not manager.is_running():
                    raise RuntimeError(
                        "transformers' continuous batching stopped before its requests were done."
                    )
        return num_tokens

    return run


def measure(name: str, *, repeats: int) -> dict[str, Any]:
    """Measure one contender in this process: median rates after one warm-up run."""
    torch.set_num_threads(1)
    make = dict(
        zip(
            CONTENDERS,
            (make_temper, make_padded_generate, make_continuous_batching),
            strict=True,
        )
    )[name]
    run = make()
    run()
    cpu_rates, wall_rates = [], []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        num_tokens = run()
        cpu_rates.append(num_tokens / (time.process_time() - cpu))
        wall_rates.append(num_tokens / (time.perf_counter() - wall))
        assert num_tokens == sum(make_workload()[1]), (num_tokens, sum(make_workload()[1]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "name": name,
        "tok_per_cpu_s": float(np.median(cpu_rates)),
        "tok_per_s": float(np.median(wall_rates)),
        "peak_rss_mib": peak,
    }


def main() -> int:
    """Measure every contender in a fresh process and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=CONTENDERS)
    parser.add_argument("--in-process", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        print(json.dumps(measure(arguments.in_process, repeats=arguments.repeats)))
        return 0
    rows = []
    for name in CONTENDERS if arguments.only is None else (arguments.only,):
        command = [
            sys.executable,
            __file__,
            "--in-process",
            name,
            "--repeats",
            str(arguments.repeats),
        ]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            print(f"{name} failed:\n{finished.stderr[-2000:]}", file=sys.stderr)
            return 1
        rows.append(json.loads(finished.stdout.splitlines()[-1]))
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )
    lengths = make_workload()[1]
    print(
        f"{NUM_PROMPTS} prompts, {sum(lengths)} tokens, longest {max(lengths)}; "
        f"bf16, 1 thread; {versions}"
    )
    print("| contender | tokens per CPU-second | tokens per second | peak memory, MiB |")
    print("|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['name']} | {row['tok_per_cpu_s']:.0f} | {row['tok_per_s']:.0f} "
            f"| {row['peak_rss_mib']:.0f} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
