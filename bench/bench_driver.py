"""Measure what a large step costs the driver: CPU time and memory without models and servers.

    OMP_NUM_THREADS=1 python bench/bench_driver.py [--rollouts 1024] [--tokens 8192]
        [--in-flight 10000] [--rows 10000000] [--json FILE]

A step of 1,024 prompts with 16 completions of 8,192 tokens has 16 times as many rollouts as the
default. Each part runs in a process of its own:

* step: messages of servers become completions, then samples, a plan and the batches of eight ranks.
* flight: rollouts that are open at the same time, each with a completion of `--tokens` tokens,
  which is decoded to text. Rewards and environments are left out.
* rows: a file of `--rows` rows, and what it takes until a run has the prompts of its first step.

The file of rows is written to the temporary directory.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from temper_trainer.batching.samples import to_samples
from temper_trainer.batching.step_plan import RoleLayout, pack_mini_batch, plan_step
from temper_trainer.config.algorithm import BatchingConfig
from temper_trainer.config.data import DataConfig, JsonlSource
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.data.memory_mapped import map_prompts
from temper_trainer.data.streams import InMemoryStream
from temper_trainer.data.text_decoder import TextDecoder
from temper_trainer.loops.rollouts.multi_turn import Conversation
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.rollout.scripted_sampler import ScriptedServer
from temper_trainer.rollout.vllm.completion_checks import check_completion
from temper_trainer.rollout.vllm.messages import (
    CallResult,
    PackedCompletion,
    ServerSpec,
    decode_result,
    encode_value,
)
from temper_trainer.types import (
    Completion,
    FinishReason,
    Prompt,
    Rollout,
    SamplingRequest,
    pack_completion,
)

VOCAB_SIZE = 150_000
SPEC = ServerSpec(arguments={}, end_token_ids=(1,), max_length=2**20, vocab_size=VOCAB_SIZE)
NUM_RANKS = 8
PROMPTS_PER_STEP = 1024


class Stopwatch:
    """Measures the parts of a step."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the CPU time of the body, and the memory that it has kept."""
        cpu_s, memory = time.process_time(), read_memory()
        yield
        self.values[f"{name}, CPU s"] = time.process_time() - cpu_s
        self.values[f"{name}, GB kept"] = (read_memory() - memory) / 1e9


def read_memory() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def read_peak() -> float:
    """Return the largest memory that this process had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer, whose words are one to three characters of ASCII."""
    alphabet = sorted(filter(str.isascii, pre_tokenizers.ByteLevel.alphabet()))
    alphabet.append("\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}")  # stands for a space
    words = itertools.chain.from_iterable(
        itertools.product(alphabet, repeat=length) for length in (1, 2, 3)
    )
    vocab = {"".join(word): i for i, word in enumerate(itertools.islice(words, VOCAB_SIZE))}
    model = Tokenizer(models.BPE(vocab, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel()
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model)


def make_message(request: SamplingRequest) -> bytes:
    """Return what a server answers: random tokens and log-probs."""
    draw, count = np.random.default_rng(request.seed), request.sampling.max_tokens
    completion = Completion(
        request_id=request.request_id,
        # Log-uniform, because the n-th most frequent word has a frequency of about 1 / n.
        tokens=(VOCAB_SIZE ** draw.random(count) - 1).astype(int).tolist(),
        rollout_logprobs=(-draw.random(count, dtype=np.float32)).tolist(),
        finish_reason=FinishReason.MAX_TOKENS,
        weight_version=1,
    )
    return encode_value([PackedCompletion.pack(completion)])


def read_message(message: bytes, request: SamplingRequest) -> Completion:
    """Return a completion as the driver gets it from a server's message."""
    (completion,) = decode_result(CallResult(number=0, method="sample", value=message))
    assert isinstance(completion, Completion)
    check_completion(request, completion, SPEC, name="server", version=1)
    return pack_completion(completion)


def make_requests(count: int, *, num_tokens: int) -> list[SamplingRequest]:
    """Return requests with prompts of 200 tokens."""
    sampling = SamplingConfig(max_tokens=num_tokens)
    tokens = tuple(range(200))
    return [
        SamplingRequest(request_id=i, prompt_tokens=tokens, sampling=sampling, seed=i)
        for i in range(count)
    ]


def measure_step(num_rollouts: int, num_tokens: int) -> dict[str, float]:
    """Measure a step from the messages of servers to the batches of ranks."""
    requests = make_requests(num_rollouts, num_tokens=num_tokens)
    messages = map(make_message, requests)
    watch, prompt = Stopwatch(), Prompt(prompt_id=0, text="", tokens=tuple(range(200)), answer="")
    # Each message is made when it is read, so that they are never all in memory.
    completions, cpu_s, memory = [], 0.0, read_memory()
    for request, message in zip(requests, messages, strict=True):
        begin = time.process_time()
        completions.append(read_message(message, request))
        cpu_s += time.process_time() - begin
    watch.values |= {
        "completions, CPU s": cpu_s,
        "completions, GB kept": (read_memory() - memory) / 1e9,
    }
    rollouts = [
        Rollout(prompt=prompt, completion=each, text="", reward=1.0, group_id=i // 16, sample_id=i)
        for i, each in enumerate(completions)
    ]
    with watch.measure("to_samples, first"):
        samples = to_samples(rollouts, temperature=1.0)
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        to_samples(rollouts, temperature=1.0)
        seconds.append(time.process_time() - begin)
    watch.values["to_samples, best of three, CPU s"] = min(seconds)
    config = BatchingConfig(max_tokens=4 * (num_tokens + 200))
    with watch.measure("plan"):
        plan = plan_step(samples, config, layouts={"actor": RoleLayout(dp_size=NUM_RANKS)}, seed=0)
    with watch.measure("batches of ranks"):
        parts = [pack_mini_batch(samples, each, "actor") for each in plan.mini_batches]
    assert len(parts[0]) == NUM_RANKS
    return watch.values | {"largest memory, GB": read_peak()}


class MessageServer(ScriptedServer):
    """Answers when all requests are open, with one message that is decoded for each of them."""

    def __init__(self, message: bytes, *, num_requests: int) -> None:
        super().__init__(lambda _: [2], end_token_id=1, token_s=0.0, max_concurrent=num_requests)
        self.load_weights([], version=1)
        self._message = message
        self._num_missing = num_requests
        self._all_open = asyncio.Event()

    async def sample_one(
        self, request: SamplingRequest, *, on_server: Callable[[int], None] | None = None
    ) -> Completion:
        """Return the completion of the message."""
        if on_server is not None:
            on_server(0)
        self._num_missing -= 1
        if self._num_missing == 0:
            self._all_open.set()
        await self._all_open.wait()
        return read_message(self._message, request)


def measure_flight(num_rollouts: int, num_tokens: int) -> dict[str, float]:
    """Measure rollouts that are all open before the first completion arrives."""
    (request,) = make_requests(1, num_tokens=num_tokens)
    requests = [request] * num_rollouts
    server = MessageServer(make_message(request), num_requests=num_rollouts)
    prompt = Prompt(prompt_id=0, text="", tokens=request.prompt_tokens, answer="")
    decoder, texts = TextDecoder(make_tokenizer()), [""] * num_rollouts
    decoder.decode([0])  # the first call lists the vocabulary

    async def finish(index: int, conversation: Conversation) -> None:
        texts[index] = decoder.decode(conversation.tokens)

    with RolloutScheduler(server) as scheduler:
        begin = time.process_time()
        conversations, _ = scheduler.run(
            scheduler.run_rollouts(requests, prompts=[prompt] * num_rollouts, finish=finish)
        )
        cpu_s = time.process_time() - begin
    assert all(each.num_tokens == num_tokens for each in conversations)
    return {"CPU ms per completion": 1e3 * cpu_s / num_rollouts, "largest memory, GB": read_peak()}


def write_rows(path: Path, *, num_rows: int) -> None:
    """Write rows of about a hundred bytes."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(num_rows):
            file.write(
                f'{{"question": "A train has {i} seats in {i % 97} cars. How many are left if '
                f'{i % 89} are taken?", "answer": "{i - i % 89}"}}\n'
            )


def measure_rows(path: str, num_prompts: int) -> dict[str, float]:
    """Measure the time and memory until the prompts of the first step are tokenized."""
    tokenizer = make_tokenizer()
    source = JsonlSource(paths=(path,))
    data = DataConfig(train=source, streaming=True)
    watch, memory, begin = Stopwatch(), read_memory(), time.perf_counter()
    with watch.measure("rows found"):
        prompts = map_prompts(data, tokenizer)
    with watch.measure("order of the first epoch"):
        stream = InMemoryStream(prompts, seed=0, shuffle=True)
    with watch.measure("prompts of the first step"):
        taken = stream.take(num_prompts)
    assert len({each.prompt_id for each in taken}) == num_prompts
    return watch.values | {
        "all, s": time.perf_counter() - begin,
        "all, GB kept": (read_memory() - memory) / 1e9,
        "largest memory, GB": read_peak(),
    }


def measure_apart(
    function: Callable[..., dict[str, float]], *arguments: object
) -> dict[str, float]:
    """Call a function in a process of its own, whose memory begins small."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the numbers, and write them to the JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    results = {
        "step": measure_apart(measure_step, chosen.rollouts, chosen.tokens),
        "flight": measure_apart(measure_flight, chosen.in_flight, chosen.tokens),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, num_rows=chosen.rows)
        size = path.stat().st_size
        num_prompts = min(PROMPTS_PER_STEP, chosen.rows)
        results["rows"] = {
            "size of the file, GB": size / 1e9,
            **measure_apart(measure_rows, str(path), num_prompts),
        }
    print("| part | value |\n|---|---|")
    for part, values in results.items():
        for name, value in values.items():
            print(f"| {part}: {name} | {value:.3f} |")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
