"""Loop ``async`` trains the groups that are ready first: all of them, and none too late."""

import asyncio
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from packages.trainer.tests.loops.byte_tokenizer_for_tests import make_tokenizer
from packages.trainer.tests.loops.test_batch_pipeline import (
    MEDIAN_TOKENS,
    SIGMA,
    draw_length,
    make_requests,
    script,
)
from temper_trainer.config.reward import RewardConfig
from temper_trainer.config_loading import load
from temper_trainer.data.text_decoder import TextDecoder
from temper_trainer.loops.rollouts.batch_pipeline import AdmissionRule, Credits
from temper_trainer.loops.rollouts.group_pipeline import GroupPipeline, GroupSink
from temper_trainer.loops.rollouts.multi_turn import Conversation
from temper_trainer.loops.rollouts.ready_groups import ReadyGroups
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.loops.rollouts.sampled_groups import (
    NumberedPrompt,
    SampledGroup,
    sample_groups,
)
from temper_trainer.loops.run.run_components import RunComponents
from temper_trainer.reward.scoring import Scorer
from temper_trainer.rollout import async_sampler
from temper_trainer.rollout.completion_record import CompletionRecorder, CompletionReplay
from temper_trainer.rollout.scripted_sampler import ScriptedServer
from temper_trainer.types import Completion, FinishReason, Prompt, SamplingRequest

NUM_STEPS = 30


@given(
    max_staleness=st.integers(0, 4),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    slow=st.integers(0, 20),
)
def test_any_order_of_events_trains_every_group_once_within_its_deadline(
    max_staleness: int, batch_size: int, seed: int, slow: int
) -> None:
    choose = random.Random(seed)
    account = Credits(max_staleness=max_staleness)
    groups = ReadyGroups[int](max_staleness=max_staleness, batch_size=batch_size)
    waiting: list[int] = []
    started: dict[int, int] = {}
    trained: list[int] = []
    while account.num_trained < NUM_STEPS:
        while account.can_start and account.num_started < NUM_STEPS:
            first = batch_size * account.num_started
            waiting += range(first, first + batch_size)
            account = account.start()
        events: list[tuple[str, list[int]]] = []
        if waiting:
            events.append(("start", [waiting[0]]))
        running = [group for group in started if group != slow]
        if running:
            events.append(("end", [choose.choice(running)]))
        if (batch := groups.choose()) is not None:
            events.append(("train", batch))
        if not events:
            # A slow group ends last, so it must not be waited for without need.
            events.append(("end", [slow]))
        kind, chosen = choose.choice(events)
        if kind == "start":
            groups.start(waiting.pop(0))
            started[chosen[0]] = account.num_trained
        elif kind == "end":
            groups.add(chosen[0], started.pop(chosen[0]))
        else:
            assert len(chosen) == batch_size
            for start in groups.take(chosen):
                assert account.num_trained - start <= max_staleness
            trained += chosen
            groups.train()
            account = account.train()
    assert sorted(trained) == list(range(NUM_STEPS * batch_size))


MakeServer = Callable[..., ScriptedServer]
make_scripted_server: MakeServer = partial(ScriptedServer, script, end_token_id=0)


def train_groups(
    rule: AdmissionRule,
    *,
    num_steps: int,
    batch_size: int,
    max_concurrent: int,
    token_s: float,
    interrupts: bool = True,
    make_server: MakeServer = make_scripted_server,
    stop: tuple[str, ...] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    recorder: CompletionRecorder | None = None,
    replay: CompletionReplay | None = None,
) -> list[tuple[int, list[tuple[int, Completion]]]]:
    """Return the version of the weights before each step, and its groups of one completion."""
    server = make_server(token_s=token_s, max_concurrent=max_concurrent)
    server.load_weights([], version=1)
    trained = []
    with RolloutScheduler(
        server,
        max_sampling=2 * max_concurrent,
        interrupts=interrupts,
        tokenizer=tokenizer,
        recorder=recorder,
        replay=replay,
    ) as scheduler:

        async def sample(step: int, sink: GroupSink[tuple[int, Completion]]) -> None:
            first = (step - 1) * batch_size
            requests, prompts = make_requests(first, batch_size=batch_size)
            requests = [
                replace(each, sampling=replace(each.sampling, stop=stop)) for each in requests
            ]

            async def finish(index: int, conversation: object) -> None:
                completion = conversation.completions[0]  # type: ignore[attr-defined]
                sink.add(first + index, (first + index, completion))

            await scheduler.run_rollouts(
                requests,
                prompts=prompts,
                priority=step,
                on_start=lambda index: sink.start(first + index),
                finish=finish,
            )

        pipeline = GroupPipeline(
            scheduler,
            sample,
            rule=rule,
            first_step=1,
            last_step=num_steps,
            batch_size=batch_size,
            recorder=recorder,
            replay=replay,
        )
        for step in range(1, num_steps + 1):
            batch = pipeline.take(step)
            pipeline.start_batches()
            trained.append((server.weight_version, batch))
            with pipeline.sync_weights(step):
                server.load_weights([], version=step + 1)
    return trained


@settings(max_examples=40, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    interrupts=st.booleans(),
    batch_size=st.integers(1, 24),
    max_concurrent=st.integers(1, 16),
)
def test_no_token_is_older_than_the_limit_when_it_is_trained(
    max_staleness: int, interrupts: bool, batch_size: int, max_concurrent: int
) -> None:
    trained = train_groups(
        AdmissionRule(max_staleness=max_staleness, overlaps=True),
        num_steps=6,
        batch_size=batch_size,
        max_concurrent=max_concurrent,
        token_s=1e-5,
        interrupts=interrupts,
    )
    for version, batch in trained:
        assert len(batch) == batch_size
        for group, completion in batch:
            assert len(completion.tokens) == draw_length(group)
            versions = completion.token_versions or (completion.weight_version,)
            assert version - max_staleness <= min(versions)
            assert max(versions) <= version
    groups = sorted(group for _, batch in trained for group, _ in batch)
    assert groups == list(range(6 * batch_size))


def measure_distance(lengths: Sequence[int]) -> float:
    """Return the Kolmogorov-Smirnov distance of lengths from the log-normal distribution."""
    ordered = sorted(lengths)

    def cdf(length: int) -> float:
        z = math.log(length / MEDIAN_TOKENS) / SIGMA
        return 0.5 * (1 + math.erf(z / math.sqrt(2)))

    # Lengths are rounded up, so both functions are compared at integers only.
    last_index = {length: i for i, length in enumerate(ordered, start=1)}
    return max(abs(i / len(ordered) - cdf(length)) for length, i in last_index.items())


CRITICAL_DISTANCE = 1.63
"""The distance of n samples, times sqrt(n), exceeds this with a probability of 1 %."""


def is_unbiased(lengths: Sequence[int]) -> bool:
    return measure_distance(lengths) <= CRITICAL_DISTANCE / math.sqrt(len(lengths))


class DrawingServer(ScriptedServer):
    """A server whose completions depend on the seed and the weights, as those of a model do.

    The length of a continuation is drawn from those above the tokens that it has.
    """

    def __init__(self, *, token_s: float, max_concurrent: int) -> None:
        super().__init__(self._draw, end_token_id=0, token_s=token_s, max_concurrent=max_concurrent)

    def _draw(self, request: SamplingRequest) -> list[int]:
        num_before = len(request.prompt_tokens) - 1
        # A continuation under the same weights must not draw the same number again.
        source = (request.prompt_tokens[0], request.seed, self.weight_version, num_before)
        lengths = NormalDist(math.log(MEDIAN_TOKENS), SIGMA)
        lowest = lengths.cdf(math.log(num_before)) if num_before else 0.0
        quantile = lowest + (1 - lowest) * random.Random(hash(source)).random()
        length = math.ceil(math.exp(lengths.inv_cdf(min(max(quantile, 1e-12), 1 - 1e-12))))
        return [1] * max(1, length - num_before)


def test_restart_of_interrupted_completions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Mostly long completions are interrupted, and drawn again they are shorter.
    monkeypatch.setattr(async_sampler, "_make_continuation", lambda request, _: request)
    monkeypatch.setattr(async_sampler, "_join", lambda _, last: last)
    trained = train_groups(
        AdmissionRule(max_staleness=2, overlaps=True),
        num_steps=11,
        batch_size=100,
        max_concurrent=50,
        token_s=1e-3,
        make_server=DrawingServer,
    )
    assert not is_unbiased(
        [len(completion.tokens) for _, batch in trained for _, completion in batch]
    )


def test_trained_lengths_have_the_distribution_of_the_sampled_ones() -> None:
    trained = train_groups(
        AdmissionRule(max_staleness=2, overlaps=True),
        num_steps=21,
        batch_size=1000,
        max_concurrent=500,
        token_s=1e-3,
        make_server=DrawingServer,
    )
    batches = [[len(completion.tokens) for _, completion in batch] for _, batch in trained]
    lengths = [length for batch in batches for length in batch]
    assert len(lengths) >= 20_000
    assert is_unbiased(lengths)
    # Steps in the middle of the run, too, although each of them prefers fast groups.
    assert is_unbiased([length for batch in batches[4:-4] for length in batch])
    # A planted bias must be found: every batch without its longest 3 %.
    assert not is_unbiased([length for batch in batches for length in sorted(batch)[:970]])
    # Some groups were overtaken, else this would test only the order of the prompts.
    steps = {group: step for step, (_, batch) in enumerate(trained) for group, _ in batch}
    assert any(step > group // 1000 for group, step in steps.items())


WORDS = ("<eos>", "x", *"stop", "st", "op")
STOP = "stop"
NUM_TOKENS_AFTER_STOP = 60


def read(tokens: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


class SpellingServer(ScriptedServer):
    """A server whose policy ends each completion with a stop text, and would continue after it.

    Each call is interrupted after a random number of tokens. The next one may have other weights,
    which write the stop text in other tokens. As a real server does, this one finds a stop text
    only in the tokens of one call.
    """

    def __init__(self, *, token_s: float, max_concurrent: int) -> None:
        super().__init__(
            self._continue, end_token_id=0, token_s=token_s, max_concurrent=max_concurrent
        )
        self._draw = random.Random(0)

    def _continue(self, request: SamplingRequest) -> list[int]:
        prompt, *tokens = request.prompt_tokens
        length, text = draw_length(prompt), read(tokens)
        left = "x" * (length - len(text)) + STOP[max(0, len(text) - length) :]
        spelling = self._draw.choice(["st|op|.", "."])
        words = re.findall(spelling, left + "x" * NUM_TOKENS_AFTER_STOP)
        return list(map(WORDS.index, words))

    def _complete(self, request: SamplingRequest, *, num_tokens: int | None = None) -> Completion:
        if num_tokens is None:
            num_tokens = 1 + int(self._draw.expovariate(1 / 27))
        completion = super()._complete(request, num_tokens=num_tokens)
        head, stop, _ = read(completion.tokens).partition(STOP)
        if not stop:
            return completion
        end = next(
            i for i in range(len(head), len(head) + 5) if stop in read(completion.tokens[:i])
        )
        return replace(
            completion,
            tokens=completion.tokens[:end],
            rollout_logprobs=completion.rollout_logprobs[:end],
            finish_reason=FinishReason.STOP_TEXT,
        )


def sample_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of 3,000 completions that a SpellingServer has sampled for loop async."""
    trained = train_groups(
        AdmissionRule(max_staleness=2, overlaps=True),
        num_steps=10,
        batch_size=300,
        max_concurrent=300,
        token_s=0,
        make_server=SpellingServer,
        stop=(STOP,),
        tokenizer=tokenizer,
    )
    return [read(completion.tokens) for _, batch in trained for _, completion in batch]


# Nightly: the test above runs the same loop, and test_async_sampler.py continues stop texts.
@pytest.mark.nightly
def test_lengths_keep_their_distribution_if_stop_texts_are_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=WORDS[0])
    texts = sample_texts(tokenizer)
    assert {len(text) - text.index(STOP) for text in texts} == {len(STOP)}
    assert is_unbiased([text.index(STOP) for text in texts])
    # A bias that must be found: completions go on after a stop text that was interrupted.
    monkeypatch.setattr(async_sampler, "cut_continuation", lambda completion, **_: completion)
    assert not is_unbiased([len(text) - len(STOP) for text in sample_texts(tokenizer)])


def test_recorded_groups_are_trained_again_in_a_replay(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    run = {"num_steps": 8, "batch_size": 16, "max_concurrent": 8, "token_s": 1e-4}
    rule = AdmissionRule(max_staleness=2, overlaps=True)
    trained = train_groups(rule, recorder=CompletionRecorder(path), **run)  # type: ignore[arg-type]
    replayed = train_groups(rule, replay=CompletionReplay(path, needs_experts=False), **run)  # type: ignore[arg-type]
    groups = [[group for group, _ in batch] for _, batch in trained]
    assert [[group for group, _ in batch] for _, batch in replayed] == groups
    assert groups != [list(range(16 * i, 16 * i + 16)) for i in range(8)]


def test_given_rollout_counts_as_started_before_it_is_scored() -> None:
    events: list[str] = []
    (request,), prompts = make_requests(0, batch_size=1)
    server = ScriptedServer(script, end_token_id=0, token_s=0.0, max_concurrent=1)

    async def score(index: int, conversation: object) -> None:
        events.append(f"scored {index}")

    with RolloutScheduler(server) as scheduler:
        scheduler.run(
            scheduler.run_rollouts(
                [request],
                prompts=prompts,
                given={0: Conversation(request=request)},
                on_start=lambda index: events.append(f"started {index}"),
                finish=score,
            )
        )
    assert events == ["started 0", "scored 0"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no server in step 1"), "no server in step 1"),
        (asyncio.CancelledError(), "CancelledError in a coroutine"),
        (SystemExit(2), "SystemExit in a coroutine: 2"),
    ],
)
def test_error_of_a_request_ends_the_step_that_waits_for_its_groups(
    error: BaseException, message: str
) -> None:
    server = ScriptedServer(script, end_token_id=0, token_s=0.0, max_concurrent=1)

    async def fail(step: int, sink: GroupSink[int]) -> None:
        await asyncio.sleep(0.05)  # by then, `take` waits
        raise error

    with RolloutScheduler(server, max_sampling=1, interrupts=True) as scheduler:
        pipeline = GroupPipeline(
            scheduler,
            fail,
            rule=AdmissionRule(max_staleness=1, overlaps=True),
            first_step=1,
            last_step=2,
            batch_size=2,
        )
        with pytest.raises((OSError, RuntimeError), match=message):
            pipeline.take(1)


class SummingModel:
    """A reward model that returns the sum of the tokens and records its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Sequence[int]]] = []

    def score_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        self.batches.append(list(rows))
        return [float(sum(row)) for row in rows]


class ListingSink:
    """Lists groups in the order in which they become ready."""

    def __init__(self) -> None:
        self.ready: list[int] = []

    def start(self, group: int) -> None:
        """Every group starts at once."""

    def add(self, group: int, value: SampledGroup) -> None:
        self.ready.append(group)


@pytest.mark.parametrize(
    ("loop", "num_rows", "ready"), [("async", [2, 2, 2], [2, 1, 0]), ("sync", [6], [0, 1, 2])]
)
def test_reward_model_scores_a_group_when_its_rollouts_have_ended(
    loop: str, num_rows: list[int], ready: list[int]
) -> None:
    config = load(["experiment=quickstart", f"loop={loop}", "algorithm.group_size=2"]).config
    tokenizer = make_tokenizer()
    prompts = [
        NumberedPrompt(
            prompt=Prompt(prompt_id=i, text="", tokens=(i + 1,), answer=""),
            step=1,
            index=i,
            position=i,
        )
        for i in range(3)
    ]
    # Group 0 takes longest.
    server = ScriptedServer(
        lambda request: [1] * (4 - request.prompt_tokens[0]),
        end_token_id=0,
        token_s=0.1,
        max_concurrent=6,
    )
    model, sink = SummingModel(), ListingSink()
    with (
        RolloutScheduler(server) as scheduler,
        Scorer(RewardConfig(function="reward_model"), model=model) as scorer,
    ):
        components = SimpleNamespace(
            config=config,
            scheduler=scheduler,
            scorer=scorer,
            text_decoder=TextDecoder(tokenizer),
            publisher=SimpleNamespace(version=0),
        )
        sampling = sample_groups(
            cast("RunComponents", components), prompts, priority=1, off_policy_seed=0, sink=sink
        )
        groups = scheduler.run(sampling)
    assert [len(rows) for rows in model.batches] == num_rows
    assert sink.ready == ready
    assert [each.rollouts[1].reward for each in groups] == [4.0, 4.0, 4.0]
