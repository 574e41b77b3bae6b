"""Multi-turn rollouts: exactly the sampled tokens are trained; text is never tokenized again."""

import asyncio
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from temper_trainer.batching.samples import to_samples
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment.protocol import (
    BrokenEnvironmentError,
    EnvironmentFactory,
    Observation,
)
from temper_trainer.environment.text_environment import TextEnvironment, TextObservation
from temper_trainer.environment.tool_environment import make_environment_factory
from temper_trainer.loops.rollouts import rollout_scheduler
from temper_trainer.loops.rollouts.multi_turn import Conversation, measure_turns
from temper_trainer.loops.rollouts.rollout_scheduler import (
    EnvironmentTimeoutError,
    RolloutFailureError,
    RolloutScheduler,
)
from temper_trainer.rollout.scripted_sampler import ScriptedSampler
from temper_trainer.types import Completion, Prompt, RefusedRequestError, Rollout, SamplingRequest

WORDS = ["<eos>", "<unk>", *"0123456789", "+", "-", "*", "=", "#", "\n", " ", "12", "error", ":"]
IDS = {word: i for i, word in enumerate(WORDS)}
CONFIG = EnvironmentConfig(
    call_start="", call_end="=", answer_start="", answer_end="", max_turns=3, max_tokens=40
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that merges "12", so that sampled "1", "2" is another token as text."""
    inner = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex(r"12|error|[\s\S]"), "isolated")
    inner.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")


class RecordingSampler(ScriptedSampler):
    """A scripted sampler that records requests and completions."""

    def __init__(self, turns: Sequence[Sequence[str]]) -> None:
        self.seen: list[tuple[SamplingRequest, Completion]] = []
        super().__init__(
            lambda request: [IDS[word] for word in turns[len(self.seen)]], end_token_id=0
        )

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        made = []
        for request in requests:
            made += super().sample([request])
            self.seen.append((request, made[-1]))
        return made


def run_conversation(
    *turns: Sequence[str],
    config: EnvironmentConfig = CONFIG,
    make_environment: EnvironmentFactory | None = None,
) -> tuple[Conversation, RecordingSampler, dict[str, float]]:
    sampler = RecordingSampler(turns)
    request = SamplingRequest(
        request_id=0, prompt_tokens=(IDS["#"],), sampling=SamplingConfig(max_tokens=20), seed=1
    )
    prompt = Prompt(prompt_id=0, text="#", tokens=(IDS["#"],), answer="")
    with RolloutScheduler(
        sampler,
        environment=config,
        make_environment=make_environment
        or make_environment_factory(config, tokenizer=tokenizer()),
    ) as scheduler:
        (conversation,), metrics = scheduler.run(
            scheduler.run_rollouts([request], prompts=[prompt])
        )
    return conversation, sampler, metrics


class LengthFee:
    """An environment that charges for the tokens of each turn and answers with a line break."""

    def reset(self, prompt: Prompt) -> None:
        pass

    def step(self, tokens: Sequence[int]) -> Observation:
        return Observation(tokens=(IDS["\n"],), reward=-0.5 * len(tokens))


def test_calculator_answers_between_completions_and_only_sampled_tokens_are_trained() -> None:
    conversation, sampler, metrics = run_conversation(
        ("3", "*", "4", "="), ("\n", "1", "2", "-", "2", "="), ("\n", "#", "<eos>")
    )
    assert tokenizer().decode(conversation.tokens, skip_special_tokens=True) == "3*4=12\n12-2=10\n#"
    rollout = Rollout(
        prompt=Prompt(prompt_id=0, text="#", tokens=(IDS["#"],), answer=""),
        completion=conversation.completions[0],
        turns=tuple(conversation.turns),
        text="",
        reward=1.0,
        group_id=0,
        sample_id=0,
    )
    samples = to_samples([rollout], temperature=1.0)
    trained_words = [
        WORDS[i]
        for i, is_trained in zip(samples.tokens.tolist(), samples.loss_mask.tolist(), strict=True)
        if is_trained
    ]
    assert trained_words == [*"3*4=", "\n", *"12-2=", "\n", "#", "<eos>"]
    assert metrics["tool/calls"] == 2.0
    assert metrics["rollout/turns_mean"] == 3.0
    # The comparator: the policy saw exactly the tokens that are trained on, although their text has
    # another spelling in tokens.
    sample_tokens = tuple(samples.tokens.tolist())
    for request, completion in sampler.seen:
        length = len(request.prompt_tokens)
        assert sample_tokens[:length] == request.prompt_tokens
        assert sample_tokens[length : length + len(completion.tokens)] == completion.tokens
    again = tokenizer()(tokenizer().decode(sample_tokens[1:]), add_special_tokens=False)[
        "input_ids"
    ]
    assert tuple(again) != sample_tokens[1:], (
        "1 and 2 were sampled apart, and would come back as one token"
    )


def test_rollout_ends_with_an_end_token_or_without_a_call() -> None:
    ended, _, _ = run_conversation(("3", "<eos>"))
    silent, _, _ = run_conversation(("3", "+"))
    assert len(ended.completions) == len(silent.completions) == 1


def test_invalid_call_gets_an_answer_and_is_counted() -> None:
    conversation, _, metrics = run_conversation(("+", "="), ("\n", "<eos>"))
    assert metrics["tool/failed"] == 1.0
    assert conversation.turns[0].observation[:2] == (IDS["error"], IDS[":"])


def test_turns_and_tokens_are_limited() -> None:
    calls = [("\n", "1", "+", "1", "=")] * 9
    assert len(run_conversation(*calls)[0].completions) == 3
    # 5 tokens and an answer of 1, then 1 token of the next completion: 7 in all.
    short, _, _ = run_conversation(*calls, config=replace(CONFIG, max_turns=9, max_tokens=7))
    assert len(short.tokens) == 7


def test_long_answer_is_truncated_and_counted() -> None:
    conversation, _, metrics = run_conversation(
        ("9", "*", "9", "="),
        ("<eos>",),
        config=EnvironmentConfig(
            call_start="",
            call_end="=",
            answer_start="",
            answer_end="",
            max_turns=3,
            max_observation_tokens=1,
        ),
    )
    assert metrics["tool/cut_answers"] == 1.0
    assert len(conversation.turns[0].observation) == 1


def test_the_reward_of_each_turn_is_kept_and_their_sum_is_the_rollouts() -> None:
    conversation, _, _ = run_conversation(
        ("1", "="), ("2", "2", "="), ("3", "<eos>"), make_environment=LengthFee
    )
    assert conversation.rewards == [-1.0, -1.5, -1.0]
    assert conversation.reward == -3.5


WAIT_S = 60.0


class StreamingScriptedSampler(ScriptedSampler):
    """A scripted sampler that returns each completion by itself, as a server does."""

    async def sample_one(
        self, request: SamplingRequest, *, on_server: Callable[[int], None] | None = None
    ) -> Completion:
        return self.sample([request])[0]


def count_down(request: SamplingRequest) -> list[int]:
    """Return a call until the prompt has four tokens, then an answer with an end token."""
    if len(request.prompt_tokens) < 4:
        return [IDS["1"], IDS["="]]
    return [IDS["7"], IDS["<eos>"]]


class Tool:
    """An environment that answers with nothing once a function of its prompt returns."""

    def __init__(self, use: Callable[[Prompt], None]) -> None:
        self._use = use

    def reset(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def step(self, tokens: Sequence[int]) -> Observation:
        self._use(self._prompt)
        return Observation(reward=0.1 * len(tokens), metrics={"tool/calls": 1.0})


class CountedRequests(list[SamplingRequest]):
    """Requests that count how often they are read from beginning to end."""

    num_reads = 0

    def __iter__(self) -> Iterator[SamplingRequest]:
        self.num_reads += 1
        return super().__iter__()


def run_group(
    sampler: ScriptedSampler,
    use: Callable[[Prompt], None],
    *,
    num_rollouts: int,
    config: EnvironmentConfig = CONFIG,
) -> tuple[list[Conversation], dict[str, float]]:
    requests = CountedRequests(
        SamplingRequest(
            request_id=i, prompt_tokens=(i + 2,), sampling=SamplingConfig(max_tokens=9), seed=i
        )
        for i in range(num_rollouts)
    )
    prompts = [
        Prompt(prompt_id=i, text="", tokens=requests[i].prompt_tokens, answer="")
        for i in range(num_rollouts)
    ]
    with RolloutScheduler(
        sampler, environment=config, make_environment=lambda: Tool(use)
    ) as scheduler:
        results = scheduler.run(scheduler.run_rollouts(requests, prompts=prompts))
    # Rollouts that each read the requests of all would take quadratic time.
    assert requests.num_reads <= 2
    return results


def test_slow_tool_holds_back_only_its_own_rollout() -> None:
    others_are_done = threading.Event()
    finished: Counter[int] = Counter()

    def use(prompt: Prompt) -> None:
        if prompt.prompt_id == 0:
            # With turns in common, the other rollouts would wait for this one's first turn.
            assert others_are_done.wait(WAIT_S)
            return
        finished[prompt.prompt_id] += 1
        if len(finished) == 3 and set(finished.values()) == {3}:
            others_are_done.set()

    conversations, _ = run_group(
        StreamingScriptedSampler(count_down, end_token_id=0), use, num_rollouts=4
    )
    assert [len(each.completions) for each in conversations] == [3, 3, 3, 3]


def test_concurrent_rollouts_equal_those_that_take_turns() -> None:
    runs = [
        run_group(sampler(count_down, end_token_id=0), lambda prompt: None, num_rollouts=40)
        for sampler in (ScriptedSampler, StreamingScriptedSampler)
    ]
    (in_turns, counts), (concurrent, concurrent_counts) = runs
    assert [each.completions for each in concurrent] != []
    assert [[(c.tokens, c.finish_reason) for c in each.completions] for each in concurrent] == [
        [(c.tokens, c.finish_reason) for c in each.completions] for each in in_turns
    ]
    assert [each.rewards for each in concurrent] == [each.rewards for each in in_turns]
    assert concurrent_counts == counts
    assert counts["tool/calls"] == 120.0


def test_number_of_environments_at_a_time_is_limited() -> None:
    lock, both_are_running = threading.Lock(), threading.Barrier(2)
    running, most = 0, 0

    def use(_: Prompt) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        # Two must be able to run together; a third one would raise `most`.
        both_are_running.wait(WAIT_S)
        with lock:
            running -= 1

    # One turn each, so that the last two environments belong to two rollouts.
    sampler = StreamingScriptedSampler(lambda request: [IDS["<eos>"]], end_token_id=0)
    run_group(sampler, use, num_rollouts=8, config=replace(CONFIG, max_concurrent=2))
    assert most == 2


def test_broken_environment_ends_the_other_rollouts() -> None:
    num_steps: Counter[int] = Counter()
    is_broken = threading.Event()

    def use(prompt: Prompt) -> None:
        num_steps[prompt.prompt_id] += 1
        if prompt.prompt_id == 1:
            is_broken.set()
            raise BrokenEnvironmentError("the tool's server is gone.")
        assert is_broken.wait(WAIT_S)

    sampler = StreamingScriptedSampler(count_down, end_token_id=0)
    with pytest.raises(BrokenEnvironmentError, match="server is gone"):
        run_group(sampler, use, num_rollouts=3)
    assert num_steps[1] == 1
    # Rollouts that were in their first turn can be one turn later by chance.
    assert max(num_steps.values()) <= 2


def fail_some(*failing: int) -> Callable[[Prompt], None]:
    """Return a tool that always fails for these prompts."""

    def use(prompt: Prompt) -> None:
        if prompt.prompt_id in failing:
            raise OSError("no such server")

    return use


def test_failed_rollouts_up_to_the_configured_fraction_are_counted_and_leave_the_others() -> None:
    sampler = StreamingScriptedSampler(count_down, end_token_id=0)
    config = replace(CONFIG, max_failure_fraction=0.5)
    conversations, metrics = run_group(sampler, fail_some(1), num_rollouts=4, config=config)
    assert [each.failure for each in conversations] == [
        None,
        "environment: OSError: no such server",
        None,
        None,
    ]
    assert [len(each.completions) for each in conversations if each.failure is None] == [3, 3, 3]
    assert metrics["rollout/failed"] == 1.0
    with pytest.raises(RolloutFailureError, match=r"3 of 4 rollouts failed.*no such server"):
        run_group(sampler, fail_some(0, 1, 2), num_rollouts=4, config=config)


@pytest.mark.parametrize("kind", [ScriptedSampler, StreamingScriptedSampler])
def test_request_that_the_sampler_refuses_fails_only_its_rollout(
    kind: type[ScriptedSampler],
) -> None:
    def script(request: SamplingRequest) -> list[int]:
        # A script without tokens is refused.
        return [] if request.prompt_tokens == (3, IDS["1"], IDS["="]) else count_down(request)

    config = replace(CONFIG, max_failure_fraction=0.25)
    conversations, metrics = run_group(
        kind(script, end_token_id=0), lambda prompt: None, num_rollouts=4, config=config
    )
    refusal = (
        "sampler: RefusedRequestError: request 1 has a script without tokens: return at least one."
    )
    assert [each.failure for each in conversations] == [None, refusal, None, None]
    assert [len(each.completions) for each in conversations] == [3, 1, 3, 3]
    assert metrics["rollout/failed"] == 1.0
    assert metrics["tool/calls"] == 10.0
    with pytest.raises(RolloutFailureError, match=r"2 of 4 .*without tokens"):
        run_group(kind(lambda _: [], end_token_id=0), print, num_rollouts=4, config=config)


@pytest.mark.parametrize("kind", [ScriptedSampler, StreamingScriptedSampler])
def test_refused_request_fails_its_rollout_without_an_environment(
    kind: type[ScriptedSampler],
) -> None:
    requests = [
        SamplingRequest(
            request_id=i, prompt_tokens=(i + 2,), sampling=SamplingConfig(max_tokens=9), seed=i
        )
        for i in range(4)
    ]
    prompts = [
        Prompt(prompt_id=i, text="", tokens=each.prompt_tokens, answer="")
        for i, each in enumerate(requests)
    ]

    def run(*, refused: int, max_failure_fraction: float) -> list[Conversation]:
        sampler = kind(lambda each: [5] if each.request_id >= refused else [], end_token_id=0)
        with RolloutScheduler(sampler, max_failure_fraction=max_failure_fraction) as scheduler:
            return scheduler.run(scheduler.run_rollouts(requests, prompts=prompts))[0]

    conversations = run(refused=2, max_failure_fraction=0.5)
    assert [each.failure is not None for each in conversations] == [True, True, False, False]
    assert [len(each.completions) for each in conversations] == [0, 0, 1, 1]
    with pytest.raises(RefusedRequestError, match=r"^request 0 has a script without tokens"):
        run(refused=1, max_failure_fraction=0.0)
    message = r"3 of 4 rollouts failed.*rollout\.max_failure_fraction = 0.5.*request 2 has"
    with pytest.raises(RolloutFailureError, match=message):
        run(refused=3, max_failure_fraction=0.5)


class FixedAnswers:
    """An environment whose methods return given values."""

    def __init__(self, opening: object = None, answer: object = None) -> None:
        self._opening = opening
        self._answer = answer

    def reset(self, prompt: Prompt) -> Observation:
        return cast(Observation, self._opening)

    def step(self, tokens: Sequence[int]) -> Observation:
        return cast(Observation, self._answer)


def make_broken() -> FixedAnswers:
    raise OSError("no such server")


def make_exiting() -> FixedAnswers:
    raise SystemExit(2)


INVALID_ANSWERS: dict[str, tuple[Callable[[], FixedAnswers], str]] = {
    "no observation": (FixedAnswers, "returned None: return an Observation"),
    "text": (lambda: FixedAnswers("opening"), "returned 'opening': return an Observation"),
    "reward": (lambda: FixedAnswers(answer=Observation(reward=math.nan)), "reward nan: .* finite"),
    "negative token": (
        lambda: FixedAnswers(answer=Observation(tokens=(1, -1))),
        "token -1: .* 0 to 21",
    ),
    "unknown token": (
        lambda: FixedAnswers(Observation(tokens=(10**9,))),
        "token 1000000000: .* 0 to 21",
    ),
    "text as tokens": (
        lambda: FixedAnswers(Observation(tokens=cast(Any, "9"))),
        "integers as tokens",
    ),
    "number as tokens": (
        lambda: FixedAnswers(answer=Observation(tokens=cast(Any, (1.5,)))),
        "integers as tokens",
    ),
    "huge reward": (lambda: FixedAnswers(answer=Observation(reward=10**400)), "a number as reward"),
    "rewards": (
        lambda: FixedAnswers(answer=Observation(reward=cast(Any, torch.ones(2)))),
        "a number as reward",
    ),
    "no metrics": (
        lambda: FixedAnswers(answer=Observation(metrics=cast(Any, None))),
        "numbers as metrics",
    ),
    "text as metric": (
        lambda: FixedAnswers(answer=Observation(metrics=cast(Any, {"a": "x"}))),
        "numbers as metrics",
    ),
    "long opening": (
        lambda: FixedAnswers(Observation(tokens=(1,) * 40)),
        "observation has 40 tokens",
    ),
    "reward of reset": (
        lambda: FixedAnswers(Observation(reward=1.0)),
        "first observation has reward 1 and is_done False",
    ),
    "end in reset": (
        lambda: FixedAnswers(Observation(is_done=True)),
        "first observation has reward 0 and is_done True",
    ),
    "factory": (make_broken, "OSError: no such server"),
    "factory that exits": (make_exiting, "SystemExit in a .*: 2"),
}


@pytest.mark.parametrize("case", INVALID_ANSWERS)
def test_invalid_answer_fails_only_its_own_rollout(case: str) -> None:
    make_invalid, reason = INVALID_ANSWERS[case]
    valid = Observation(tokens=(IDS["\n"],), is_done=True)
    remaining: list[Callable[[], FixedAnswers]] = [lambda: FixedAnswers(answer=valid), make_invalid]

    def make_environment() -> FixedAnswers:
        return remaining.pop()()

    requests = [
        SamplingRequest(
            request_id=i, prompt_tokens=(2,), sampling=SamplingConfig(max_tokens=9), seed=i
        )
        for i in range(2)
    ]
    prompts = [Prompt(prompt_id=i, text="", tokens=(2,), answer="") for i in range(2)]
    with RolloutScheduler(
        StreamingScriptedSampler(count_down, end_token_id=0),
        # Constructed one after another, so that the first one fails.
        environment=replace(CONFIG, max_failure_fraction=0.5, max_concurrent=1),
        make_environment=make_environment,
        vocab_size=len(WORDS),
    ) as scheduler:
        (failed, other), _ = scheduler.run(scheduler.run_rollouts(requests, prompts=prompts))
    assert re.search(reason, failed.failure or "")
    assert other.failure is None
    assert len(other.completions) == 1


def test_failed_rollout_starts_again_with_the_same_seed_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seeds: list[int] = []
    num_failures = 0

    def script(request: SamplingRequest) -> list[int]:
        seeds.append(request.seed)
        return count_down(request)

    def use(_: Prompt) -> None:
        nonlocal num_failures
        if len(seeds) in (2, 3):  # in the second turn, and then in the first one
            num_failures += 1
            raise OSError("no such server")

    sampler = StreamingScriptedSampler(script, end_token_id=0)
    config = replace(CONFIG, max_retries=2)
    (conversation,), metrics = run_group(sampler, use, num_rollouts=1, config=config)
    assert num_failures == 2
    assert conversation.failure is None
    assert metrics["rollout/failed"] == 0.0
    assert metrics["rollout/retries"] == 2.0
    assert caplog.text.count("starts again, because it failed: environment: OSError: no such") == 2
    assert seeds[2] == seeds[3] == seeds[0]
    assert seeds[4] == seeds[1]


def test_environment_that_hangs_fails_only_its_own_rollout() -> None:
    is_over = threading.Event()
    config = replace(
        CONFIG, step_timeout_s=0.2, max_failure_fraction=0.5, max_concurrent=1, max_turns=1
    )

    def use(prompt: Prompt) -> None:
        if prompt.prompt_id == 0:
            is_over.wait(WAIT_S)

    sampler = StreamingScriptedSampler(count_down, end_token_id=0)
    conversations, _ = run_group(sampler, use, num_rollouts=3, config=config)
    assert [each.failure is None for each in conversations] == [False, True, True]
    with pytest.raises(EnvironmentTimeoutError, match="did not answer within"):
        run_group(sampler, use, num_rollouts=3, config=replace(config, max_failure_fraction=0.0))
    is_over.set()


class AsynchronousTool:
    """An environment of coroutines, with a first observation, which records that it is closed."""

    def __init__(self, step: Callable[[Prompt], Awaitable[None]], closed: list[int]) -> None:
        self._step = step
        self._closed = closed

    async def reset(self, prompt: Prompt) -> Observation:
        self._prompt = prompt
        return Observation(tokens=(IDS["9"],), metrics={"tool/calls": 1.0})

    async def step(self, tokens: Sequence[int]) -> Observation:
        await self._step(self._prompt)
        return Observation(tokens=(IDS["\n"],), metrics={"tool/failed": 1.0})

    async def close(self) -> None:
        self._closed.append(self._prompt.prompt_id)


def run_asynchronous(
    step: Callable[[Prompt], Awaitable[None]], *, config: EnvironmentConfig
) -> tuple[list[Conversation], list[SamplingRequest], list[int]]:
    requested: list[SamplingRequest] = []
    closed: list[int] = []

    def script(request: SamplingRequest) -> list[int]:
        requested.append(request)
        return [IDS["1"], IDS["="]]

    requests = [
        SamplingRequest(
            request_id=i, prompt_tokens=(i + 2,), sampling=SamplingConfig(max_tokens=9), seed=i
        )
        for i in range(3)
    ]
    prompts = [Prompt(prompt_id=i, text="", tokens=(i + 2,), answer="") for i in range(3)]
    with RolloutScheduler(
        StreamingScriptedSampler(script, end_token_id=0),
        environment=config,
        make_environment=lambda: AsynchronousTool(step, closed),
    ) as scheduler:
        conversations, _ = scheduler.run(scheduler.run_rollouts(requests, prompts=prompts))
    return conversations, requested, closed


def test_constructors_run_at_the_same_time_up_to_the_limit() -> None:
    most, barrier = 0, threading.Barrier(2)
    constructing: set[int] = set()

    class SlowConstructor(LengthFee):
        def __init__(self) -> None:
            nonlocal most
            constructing.add(threading.get_ident())
            barrier.wait(WAIT_S)  # for another constructor
            most = max(most, len(constructing))
            barrier.wait(WAIT_S)
            constructing.discard(threading.get_ident())

    requests = [
        SamplingRequest(
            request_id=i, prompt_tokens=(2,), sampling=SamplingConfig(max_tokens=9), seed=i
        )
        for i in range(4)
    ]
    prompts = [Prompt(prompt_id=i, text="", tokens=(2,), answer="") for i in range(4)]
    with RolloutScheduler(
        StreamingScriptedSampler(count_down, end_token_id=0),
        environment=replace(CONFIG, max_concurrent=2, max_turns=1),
        make_environment=SlowConstructor,
    ) as scheduler:
        conversations, _ = scheduler.run(scheduler.run_rollouts(requests, prompts=prompts))
    assert [len(each.completions) for each in conversations] == [1] * 4
    assert most == 2


class CountedEnvironment(AsynchronousTool):
    """An environment of two turns that counts how many of its kind are open."""

    num_open = most_open = num_failures_left = 0
    lock = threading.Lock()

    def __init__(self) -> None:
        super().__init__(self._answer, [])
        with self.lock:
            CountedEnvironment.num_open += 1
            CountedEnvironment.most_open = max(self.most_open, self.num_open)

    async def _answer(self, _: Prompt) -> None:
        await asyncio.sleep(0.01)
        if self.num_failures_left:
            CountedEnvironment.num_failures_left -= 1
            raise OSError("the container has stopped")

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        with self.lock:
            CountedEnvironment.num_open -= 1


@pytest.mark.parametrize("make_sampler", [ScriptedSampler, StreamingScriptedSampler])
@pytest.mark.parametrize(("max_open", "expected"), [(3, 3), (None, 12)])
def test_number_of_open_environments_is_limited(
    make_sampler: type[ScriptedSampler], max_open: int | None, expected: int
) -> None:
    CountedEnvironment.num_open = CountedEnvironment.most_open = 0
    # A rollout that starts again waits for the limit again.
    CountedEnvironment.num_failures_left = 4
    requests = [
        SamplingRequest(
            request_id=i, prompt_tokens=(2,), sampling=SamplingConfig(max_tokens=9), seed=i
        )
        for i in range(12)
    ]
    prompts = [Prompt(prompt_id=i, text="", tokens=(2,), answer="") for i in range(12)]
    with RolloutScheduler(
        make_sampler(count_down, end_token_id=0),
        environment=replace(CONFIG, max_turns=2, max_retries=4, max_open=max_open),
        make_environment=partial(CountedEnvironment),
    ) as scheduler:
        conversations, _ = scheduler.run(scheduler.run_rollouts(requests, prompts=prompts))
    assert [len(each.completions) for each in conversations] == [2] * 12
    assert sum(each.num_retries for each in conversations) == 4
    assert CountedEnvironment.num_open == 0
    assert CountedEnvironment.most_open == expected


class HalfCharacters(TextEnvironment):
    """An environment whose text has half of a surrogate pair, as JSON of a policy may have."""

    async def open(self, prompt: Prompt) -> str:
        return ""

    async def respond(self, text: str) -> TextObservation:
        return TextObservation(text="1\ud83d2")


def test_text_that_no_tokenizer_takes_is_replaced() -> None:
    conversation, _, _ = run_conversation(
        ("3", "="),
        ("<eos>",),
        make_environment=lambda: HalfCharacters(config=CONFIG, tokenizer=tokenizer()),
    )
    words = [WORDS[token] for token in conversation.tokens]
    assert words == ["3", "=", "1", "<unk>", "2", "<eos>"]


def test_first_observation_follows_the_prompt_and_counts_in_the_limit() -> None:
    async def step(_: Prompt) -> None:
        return

    conversations, requested, closed = run_asynchronous(step, config=replace(CONFIG, max_tokens=6))
    metrics = measure_turns(conversations)
    assert (metrics["tool/calls"], metrics["tool/failed"]) == (3.0, 6.0)
    # Of six tokens the opening takes one, then a completion of two, an answer of one, and two.
    assert [each.prompt_tokens for each in requested if each.prompt_tokens[0] == 2] == [
        (2, IDS["9"]),
        (2, IDS["9"], IDS["1"], IDS["="], IDS["\n"]),
    ]
    assert [each.opening for each in conversations] == [(IDS["9"],)] * 3
    assert conversations[0].full_tokens == [2, IDS["9"], *conversations[0].tokens]
    assert sorted(closed) == [0, 1, 2]


class WrappedLengthFee(LengthFee):
    """An environment whose methods are no coroutine functions, but return coroutines."""

    closed: ClassVar[list[str]] = []

    def step(self, tokens: Sequence[int]) -> Awaitable[Observation]:  # type: ignore[override]
        return self._answer(tokens)

    async def _answer(self, tokens: Sequence[int]) -> Observation:
        return super().step(tokens)

    def close(self) -> Awaitable[None]:
        return self._close()

    async def _close(self) -> None:
        self.closed.append("closed")


def test_coroutines_that_methods_return_are_awaited() -> None:
    WrappedLengthFee.closed.clear()
    conversation, _, _ = run_conversation(
        ("3", "<eos>"), make_environment=partial(WrappedLengthFee)
    )
    assert conversation.rewards[0] == -1.0
    assert WrappedLengthFee.closed == ["closed"]


def test_coroutine_that_takes_too_long_is_cancelled_and_its_environment_closed() -> None:
    cancelled: list[int] = []

    async def step(prompt: Prompt) -> None:
        if prompt.prompt_id == 1:
            try:
                await asyncio.sleep(WAIT_S)
            except asyncio.CancelledError:
                cancelled.append(prompt.prompt_id)
                raise

    config = replace(CONFIG, step_timeout_s=0.2, max_failure_fraction=0.5)
    conversations, _, closed = run_asynchronous(step, config=config)
    assert [each.failure is None for each in conversations] == [True, False, True]
    assert cancelled == [1]
    assert sorted(closed) == [0, 1, 2]


async def await_cancelled_task() -> None:
    task = asyncio.create_task(asyncio.sleep(WAIT_S))
    task.cancel()
    await task


async def exit_process() -> None:
    sys.exit(2)


async def await_exiting_task() -> None:
    await asyncio.create_task(exit_process())


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (await_cancelled_task, "CancelledError in a coroutine"),
        (exit_process, "SystemExit in a coroutine: 2"),
        (await_exiting_task, "SystemExit in a coroutine: 2"),
    ],
)
def test_coroutine_that_is_cancelled_or_exits_fails_only_its_own_rollout(
    end: Callable[[], Awaitable[None]], reason: str
) -> None:
    async def step(prompt: Prompt) -> None:
        if prompt.prompt_id == 1:
            await end()

    config = replace(CONFIG, max_failure_fraction=0.5)
    conversations, _, closed = run_asynchronous(step, config=config)
    failure = f"environment: RuntimeError: {reason}"
    assert [each.failure for each in conversations] == [None, failure, None]
    assert sorted(closed) == [0, 1, 2]


def test_later_turns_go_to_the_replica_of_the_first_one() -> None:
    seen: list[SamplingRequest] = []

    def script(request: SamplingRequest) -> list[int]:
        seen.append(request)
        return count_down(request)

    run_group(StreamingScriptedSampler(script, end_token_id=0), lambda prompt: None, num_rollouts=2)
    sessions = {(request.prompt_tokens[0], request.session) for request in seen}
    assert len(seen) == 6
    assert len(sessions) == 2
    assert None not in {session for _, session in sessions}


class SharedServer:
    """Makes the environments of a run, and ends what they share."""

    def __call__(self) -> Tool:
        raise NotImplementedError

    async def close(self) -> None:
        await asyncio.sleep(0.05)


class HangingServer(SharedServer):
    """A server that does not end."""

    async def close(self) -> None:
        await asyncio.Event().wait()


def test_shared_server_that_does_not_end_keeps_no_run_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("CLOSE_TIMEOUT_S", "CANCEL_TIMEOUT_S"):
        monkeypatch.setattr(rollout_scheduler, name, 0.1)
    scheduler = RolloutScheduler(
        RecordingSampler([]), environment=CONFIG, make_environment=HangingServer()
    )
    scheduler.close()
    assert not scheduler._thread.is_alive()
    assert "HangingServer did not end within 0.1 s" in caplog.text


def test_cancelled_coroutine_closes_its_connection_before_the_scheduler_ends() -> None:
    has_started, closed = threading.Event(), []

    async def use_connection() -> None:
        try:
            has_started.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)  # a server confirms the end
            closed.append(True)

    with RolloutScheduler(
        RecordingSampler([]), environment=CONFIG, make_environment=SharedServer()
    ) as scheduler:
        scheduler.start(use_connection())
        assert has_started.wait(10)
    assert closed == [True]
