"""Test completions that are interrupted for new weights and continue under them."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from packages.trainer.tests.rollout.models_for_tests import (
    Pair,
    make_prompts,
    make_requests,
    make_tokenizer,
)
from temper_engine_api.errors import EngineStateError
from temper_engine_api.weights import NamedWeight
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.rollout.async_sampler import AsyncSampler, Cohort
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.rollout.scripted_sampler import ScriptedSampler
from temper_trainer.rollout.stop_texts import cut_continuation
from temper_trainer.types import Completion, FinishReason, Prompt, SamplingRequest

REQUESTS = make_requests(make_prompts(6, seed=4), SamplingConfig(max_tokens=60), seeds=range(6))


def other_weights(pair: Pair) -> list[NamedWeight]:
    generator = torch.Generator().manual_seed(3)
    changed = {
        n: p + torch.randn(p.shape, generator=generator) * 0.1
        for n, p in pair.model.named_parameters()
    }
    return [NamedWeight(name, tensor) for name, tensor in changed.items()]


async def sample_all(
    sampler: AsyncSampler, requests: Sequence[SamplingRequest]
) -> list[Completion]:
    """Return the completions of rollouts of one turn."""
    cohort = Cohort(num_open=len(requests))

    async def sample(index: int) -> Completion:
        try:
            return await sampler.sample(requests[index], cohort=cohort, index=index)
        finally:
            sampler.leave(cohort)

    return await asyncio.gather(*map(sample, range(len(requests))))


class StopsAtToken:
    """A transformers sampler that interrupts itself after a fixed number of tokens."""

    def __init__(self, sampler: HfSampler, *, at: int) -> None:
        self.inner = sampler
        self._at = at
        self._is_cut = False
        self.calls: list[list[tuple[SamplingRequest, Completion]]] = []
        self.then: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def sample(self, requests: list[SamplingRequest]) -> list[Completion]:
        completions = self._sample(requests)
        self.calls.append(list(zip(requests, completions, strict=True)))
        return completions

    def _sample(self, requests: list[SamplingRequest]) -> list[Completion]:
        if self._is_cut:
            return self.inner.sample(requests)
        short = [replace(r, sampling=replace(r.sampling, max_tokens=self._at)) for r in requests]
        cut = self.inner.sample(short)
        self._is_cut = True
        self.then()
        return [
            replace(c, finish_reason=FinishReason.INTERRUPTED)
            if c.finish_reason == FinishReason.MAX_TOKENS
            else c
            for c in cut
        ]


def test_every_token_has_version_and_logprob_of_the_weights_that_sampled_it(
    qwen2: Pair,
) -> None:
    stopping = StopsAtToken(qwen2.sampler(), at=10)
    sampler = AsyncSampler(stopping, interrupts=True)  # type: ignore[arg-type]
    stopping.then = lambda: stopping.inner.load_weights(other_weights(qwen2), version=1)
    completions = asyncio.run(sample_all(sampler, REQUESTS))
    old, new = qwen2.sampler(), qwen2.sampler()
    new.load_weights(other_weights(qwen2), version=1)
    mixed = [completion for completion in completions if completion.token_versions]
    assert mixed
    for request, completion in zip(REQUESTS, completions, strict=True):
        row = [(*request.prompt_tokens, *completion.tokens)]
        start = len(request.prompt_tokens) - 1
        by_version = [s.compute_logprobs(row, temperature=1.0)[0][start:] for s in (old, new)]
        versions = completion.token_versions or (completion.weight_version,) * len(
            completion.tokens
        )
        expected = [by_version[version][i] for i, version in enumerate(versions)]
        assert completion.rollout_logprobs == pytest.approx(expected, abs=2e-5)
        assert completion.weight_version == min(versions)
        assert len(completion.tokens) <= 60


def test_request_that_is_too_long_does_not_affect_the_others(qwen2: Pair) -> None:
    too_long = replace(REQUESTS[2], prompt_tokens=(5,) * 250)
    requests = [*REQUESTS[:2], too_long, *REQUESTS[3:]]
    prompts = [
        Prompt(prompt_id=i, text="", tokens=each.prompt_tokens, answer="")
        for i, each in enumerate(requests)
    ]
    with RolloutScheduler(qwen2.sampler(), max_failure_fraction=0.2) as scheduler:
        conversations, _ = scheduler.run(scheduler.run_rollouts(requests, prompts=prompts))
        failed = conversations.pop(2)
        assert "request 2 needs 310 positions" in (failed.failure or "")
        expected = qwen2.sampler().sample([*requests[:2], *requests[3:]])
        assert [tuple(each.completions[0].tokens) for each in conversations] == [
            each.tokens for each in expected
        ]
        # What concerns the sampler as a whole ends all rollouts.
        scheduler._sampler._sampler.close()
        with pytest.raises(EngineStateError):
            scheduler.run(scheduler.run_rollouts(requests, prompts=prompts))


def test_interrupt_returns_partial_completions(qwen2: Pair) -> None:
    sampler = qwen2.sampler()
    sampler.interrupt()
    completions = sampler.sample(REQUESTS)
    assert {c.finish_reason for c in completions} == {FinishReason.INTERRUPTED}
    assert [len(c.tokens) for c in completions] == [0] * 6
    sampler.load_weights(other_weights(qwen2), version=1)
    assert FinishReason.INTERRUPTED not in {c.finish_reason for c in sampler.sample(REQUESTS)}


def test_pause_without_interrupts_waits_for_complete_completions(qwen2: Pair) -> None:
    sampler = AsyncSampler(qwen2.sampler(), interrupts=False)

    async def pause_while_sampling() -> list[Completion]:
        sampling = asyncio.create_task(sample_all(sampler, REQUESTS))
        while sampler.num_active == 0:
            await asyncio.sleep(0)
        await sampler.pause()
        assert sampler.num_active == 0
        sampler.resume()
        return await sampling

    completions = asyncio.run(pause_while_sampling())
    assert sampler.num_resumed == 0
    sampled = qwen2.sampler().sample(REQUESTS)
    assert [tuple(c.tokens) for c in completions] == [c.tokens for c in sampled]


def test_pause_interrupts_and_new_weights_continue_the_completions(qwen2: Pair) -> None:
    inner = qwen2.sampler()
    sampler = AsyncSampler(inner, interrupts=True)

    async def publish_while_sampling() -> list[Completion]:
        sampling = asyncio.create_task(sample_all(sampler, REQUESTS))
        while sampler.num_active == 0:
            await asyncio.sleep(0)
        await sampler.pause()
        assert not sampling.done()
        inner.load_weights(other_weights(qwen2), version=1)
        sampler.resume()
        return await sampling

    completions = asyncio.run(publish_while_sampling())
    assert sampler.num_resumed > 0
    assert FinishReason.INTERRUPTED not in {c.finish_reason for c in completions}
    assert max(max(c.token_versions or (c.weight_version,)) for c in completions) == 1


def test_interrupted_completions_with_stop_texts_continue(qwen2: Pair) -> None:
    stopping = StopsAtToken(qwen2.sampler(), at=3)
    sampler = AsyncSampler(stopping, interrupts=True, tokenizer=make_tokenizer())  # type: ignore[arg-type]
    requests = [
        replace(r, sampling=replace(r.sampling, stop=("zq",), max_tokens=30)) for r in REQUESTS
    ]
    asyncio.run(sample_all(sampler, requests))
    first, second = stopping.calls
    beginnings = {
        (*request.prompt_tokens, *completion.tokens)
        for request, completion in first
        if completion.finish_reason == FinishReason.INTERRUPTED
    }
    assert beginnings
    assert {request.prompt_tokens for request, _ in second} == beginnings


@pytest.mark.parametrize(("begin", "end"), [(1, 4), (2, 5), (3, 5)])
def test_stop_text_is_found_across_an_interruption(qwen2: Pair, begin: int, end: int) -> None:
    # Greedy, so that a continuation samples the same tokens as a call without interruption.
    greedy = [replace(r, sampling=SamplingConfig(temperature=0, max_tokens=30)) for r in REQUESTS]
    tokenizer = make_tokenizer()
    requests = [
        replace(
            request,
            sampling=replace(
                request.sampling, stop=(str(tokenizer.decode(completion.tokens[begin:end])),)
            ),
        )
        for request, completion in zip(greedy, qwen2.sampler().sample(greedy), strict=True)
        if len(completion.tokens) > end
    ]
    expected = qwen2.sampler().sample(requests)
    assert max(len(each.tokens) for each in expected) == end
    stopping = StopsAtToken(qwen2.sampler(), at=3)
    sampler = AsyncSampler(stopping, interrupts=True, tokenizer=tokenizer)  # type: ignore[arg-type]
    completions = asyncio.run(sample_all(sampler, requests))
    assert [list(each.tokens) for each in completions] == [list(each.tokens) for each in expected]
    assert {each.finish_reason for each in completions} == {FinishReason.STOP_TEXT}
    for completion, other in zip(completions, expected, strict=True):
        assert list(completion.rollout_logprobs) == pytest.approx(
            list(other.rollout_logprobs), abs=2e-5
        )


def test_call_waits_for_a_rollout_that_has_given_up_a_request() -> None:
    calls: list[list[int]] = []

    class Recording(ScriptedSampler):
        def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
            calls.append([request.request_id for request in requests])
            return super().sample(requests)

    async def give_up() -> None:
        sampler, cohort = AsyncSampler(Recording(lambda _: [1], end_token_id=1)), Cohort(num_open=2)
        requests = make_requests([[2], [3], [4]], SamplingConfig(max_tokens=4))

        def start(number: int, index: int) -> "asyncio.Task[Completion]":
            return asyncio.create_task(sampler.sample(requests[number], cohort=cohort, index=index))

        given_up = start(0, 0)
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        other = start(1, 1)
        await asyncio.sleep(0.05)
        assert calls == []
        await asyncio.gather(other, start(2, 0))

    asyncio.run(give_up())
    assert calls == [[2, 1]]


def test_tokens_after_a_stop_text_are_dropped_with_their_logprobs_and_experts() -> None:
    # Tokens 2 to 6 are a to e; a prompt of two tokens and the interrupted part "ab" come before.
    continuation = Completion(
        request_id=0,
        tokens=(4, 5, 6),
        rollout_logprobs=(-0.25, -0.5, -0.75),
        finish_reason=FinishReason.INTERRUPTED,
        weight_version=3,
        routed_experts=torch.arange(6).view(6, 1, 1),
    )
    before, tokenizer = (2, 3), make_tokenizer()
    cut = cut_continuation(continuation, before=before, stop=("x", "bc"), tokenizer=tokenizer)
    assert (cut.tokens, cut.rollout_logprobs) == ((4,), (-0.25,))
    assert cut.finish_reason == FinishReason.STOP_TEXT
    assert cut.routed_experts.flatten().tolist() == [0, 1, 2, 3]
    assert cut_continuation(continuation, before=before, stop=("bd",), tokenizer=tokenizer) == (
        continuation
    )


def test_sampled_completions_need_9_bytes_per_token_and_keep_their_values() -> None:
    def script(request: SamplingRequest) -> list[int]:
        return [int(text) for text in f"{request.seed} 70000 150001 1".split()] * 1000

    # The log-prob is one that float32 can represent, as are those of all samplers.
    scripted = ScriptedSampler(script, end_token_id=1, logprob=-0.375)
    requests = make_requests([(5,)] * 2, SamplingConfig(max_tokens=4000), seeds=(90000, 90001))
    completions = asyncio.run(sample_all(AsyncSampler(scripted), requests))
    for request, completion in zip(requests, completions, strict=True):
        assert list(completion.tokens) == script(request)
        assert list(completion.rollout_logprobs) == [-0.375] * 4000
        num_bytes = sys.getsizeof(completion.tokens) + sys.getsizeof(completion.rollout_logprobs)
        assert num_bytes <= 9 * 4000
