"""Test completions that are interrupted for new weights and continue under them."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from packages.trainer.tests.rollout.models_for_tests import Pair, make_prompts, make_requests
from temper_engine_api.weights import NamedWeight
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.rollout.pausable_sampler import PausableSampler, SamplingCancelledError
from temper_trainer.types import Completion, FinishReason, SamplingRequest

REQUESTS = make_requests(make_prompts(6, seed=4), SamplingConfig(max_tokens=60), seeds=range(6))


def other_weights(pair: Pair) -> list[NamedWeight]:
    generator = torch.Generator().manual_seed(3)
    changed = {
        n: p + torch.randn(p.shape, generator=generator) * 0.1
        for n, p in pair.model.named_parameters()
    }
    return [NamedWeight(name, tensor) for name, tensor in changed.items()]


class StopsAtToken:
    """A transformers sampler that interrupts itself after a fixed number of tokens."""

    def __init__(self, sampler: HfSampler, *, at: int) -> None:
        self.inner = sampler
        self._at = at
        self._is_cut = False
        self.then: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def sample(self, requests: list[SamplingRequest]) -> list[Completion]:
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
    sampler = PausableSampler(stopping, interrupts=True)  # type: ignore[arg-type]
    stopping.then = lambda: sampler.load_weights(other_weights(qwen2), version=1)
    completions = sampler.sample(REQUESTS)
    old, new = qwen2.sampler(), qwen2.sampler()
    new.load_weights(other_weights(qwen2), version=1)
    mixed = [completion for completion in completions if completion.token_versions]
    assert mixed
    for request, completion in zip(REQUESTS, completions, strict=True):
        row = [(*request.prompt_tokens, *completion.tokens)]
        start = len(request.prompt_tokens) - 1
        by_version = [s.logprobs(row, temperature=1.0)[0][start:] for s in (old, new)]
        versions = completion.token_versions or (completion.weight_version,) * len(
            completion.tokens
        )
        expected = [by_version[version][i] for i, version in enumerate(versions)]
        assert completion.rollout_logprobs == pytest.approx(expected, abs=2e-5)
        assert completion.weight_version == min(versions)
        assert len(completion.tokens) <= 60


def test_interrupt_returns_partial_completions(qwen2: Pair) -> None:
    sampler = qwen2.sampler()
    sampler.interrupt()
    completions = sampler.sample(REQUESTS)
    assert {c.finish_reason for c in completions} == {FinishReason.INTERRUPTED}
    assert [len(c.tokens) for c in completions] == [0] * 6
    sampler.load_weights(other_weights(qwen2), version=1)
    assert FinishReason.INTERRUPTED not in {c.finish_reason for c in sampler.sample(REQUESTS)}


def test_pause_without_interrupts_waits_for_complete_completions(qwen2: Pair) -> None:
    sampler = PausableSampler(qwen2.sampler(), interrupts=False)
    completions: list[Completion] = []
    thread = threading.Thread(target=lambda: completions.extend(sampler.sample(REQUESTS)))
    thread.start()
    while thread.is_alive() and sampler._num_active == 0:
        thread.join(0.001)
    with sampler.pause():
        assert sampler._num_active == 0
    thread.join(60)
    assert sampler.num_resumed == 0
    assert [c.tokens for c in completions] == [c.tokens for c in qwen2.sampler().sample(REQUESTS)]


def test_interrupted_completions_with_stop_texts_start_again(
    qwen2: Pair,
) -> None:
    stopping = StopsAtToken(qwen2.sampler(), at=3)
    sampler = PausableSampler(stopping, interrupts=True)  # type: ignore[arg-type]
    requests = [
        replace(r, sampling=replace(r.sampling, stop=("zq",), max_tokens=30)) for r in REQUESTS
    ]
    assert sampler.sample(requests) == qwen2.sampler().sample(requests)


def test_canceling_ends_an_open_call_with_an_error(qwen2: Pair) -> None:
    sampler = PausableSampler(qwen2.sampler(), interrupts=True)
    sampler.cancel()
    with pytest.raises(SamplingCancelledError):
        sampler.sample(REQUESTS)
