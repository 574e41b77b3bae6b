"""The real thing: a vLLM server on this machine's CPU, held to the transformers sampler."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from packages.trainer.tests.rollout.conftest import Pairs
from packages.trainer.tests.rollout.models_for_tests import (
    make_prompts,
    make_requests,
    make_tokenizer,
)
from temper_engine_api.errors import ConfigError, WeightError
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.async_sampler import AsyncSampler, Cohort
from temper_trainer.rollout.vllm.server_process import ServerProcess
from temper_trainer.types import Completion, FinishReason, RefusedRequestError, SamplingRequest

from .conftest import Serve, Served

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

TOLERANCE = 5e-6
"""Tolerance of float32 log-probs: both sides round the same formula in different orders."""
LONG_TOLERANCE = 2e-5
"""Tolerance for 200 tokens under weights that five perturbations made large; measured 8.6e-6."""
GREEDY = SamplingConfig(temperature=0, max_tokens=24)
LONG = SamplingConfig(max_tokens=200)


@pytest.fixture(scope="module")
def served(serve: Serve, pairs: Pairs) -> Served:
    """One server, with weights."""
    servers = serve(pairs.get("qwen3_wide"))
    servers.publish(1)
    return servers


def assert_equals_hf(served: Served, *, prompts: list[list[int]]) -> None:
    requests = make_requests(prompts, GREEDY)
    for hf_completion, vllm_completion in zip(
        served.pair.sampler().sample(requests), served.sampler.sample(requests), strict=True
    ):
        assert tuple(vllm_completion.tokens) == hf_completion.tokens
        assert vllm_completion.finish_reason == hf_completion.finish_reason
        assert vllm_completion.rollout_logprobs == pytest.approx(
            hf_completion.rollout_logprobs, abs=TOLERANCE
        )
        assert vllm_completion.weight_version == served.sampler.weight_version


def test_greedy_tokens_and_logprobs_equal_the_transformers_sampler(served: Served) -> None:
    assert_equals_hf(served, prompts=make_prompts(12))


@pytest.mark.parametrize("bucket_bytes", [7000, 13000])
def test_fused_layer_may_be_split_over_buckets(served: Served, bucket_bytes: int) -> None:
    # q, k and v of a layer are 128 x 24 and twice 64 x 24 floats: 12288 and twice 6144 bytes, fused
    # in vLLM, in different buckets here.
    served.perturb(bucket_bytes)
    served.publish_next(bucket_bytes=bucket_bytes)
    assert_equals_hf(served, prompts=make_prompts(12))


def test_output_head_tied_to_the_embedding_follows_every_weight_sync(
    serve: Serve, pairs: Pairs
) -> None:
    tied = serve(pairs.get("qwen3_tied"))
    tied.publish(1)
    assert_equals_hf(tied, prompts=make_prompts(4))
    tied.perturb(3)
    tied.publish_next(bucket_bytes=7000)
    assert_equals_hf(tied, prompts=make_prompts(4))
    tied.sampler.close()


def test_prefix_cache_is_cleared_after_a_weight_sync(served: Served) -> None:
    long = [make_prompts(1, seed=3, longest=20)[0] * 12][0][
        :200
    ]  # several blocks of the prefix cache
    served.sampler.sample(make_requests([long], GREEDY))
    served.perturb(77)
    served.publish_next()
    assert_equals_hf(served, prompts=[long])


def test_logprobs_of_given_tokens_equal_the_transformers_samplers(served: Served) -> None:
    rows = [list(range(2, 30)), list(range(5, 9))]
    hf_completion = served.pair.sampler().compute_logprobs(rows, temperature=1.0)
    for one, other in zip(
        hf_completion, served.sampler.compute_logprobs(rows, temperature=1.0), strict=True
    ):
        assert other == pytest.approx(one, abs=TOLERANCE)
    with pytest.raises(ConfigError, match=r"only at temperature 1, not at 0\.5"):
        served.sampler.compute_logprobs(rows, temperature=0.5)


def test_server_scores_given_tokens_and_its_top_k_as_a_teacher(
    served: Served,
) -> None:
    row, first = tuple(range(2, 20)), 5
    (scores,) = served.sampler.call_each("score_prompts", [([(row, first)], 3)])
    assert isinstance(scores, list)
    ((given, ids, logs),) = scores
    for i, position in enumerate(range(first, len(row))):
        expected = served.pair.next_logits(row[:position]).log_softmax(-1)
        assert given[i] == pytest.approx(float(expected[row[position]]), abs=TOLERANCE)
        assert ids[i] == expected.topk(3).indices.tolist()
        assert logs[i] == pytest.approx(expected.topk(3).values.tolist(), abs=TOLERANCE)


def test_sampled_tokens_have_the_models_logprobs_and_depend_on_their_seed(served: Served) -> None:
    requests = make_requests(make_prompts(8), SamplingConfig(max_tokens=20), seeds=range(8))
    once, again = served.sampler.sample(requests), served.sampler.sample(requests)
    other = served.sampler.sample(
        [replace(request, seed=request.seed + 100) for request in requests]
    )
    assert [c.tokens for c in once] == [c.tokens for c in again]
    assert [c.tokens for c in once] != [c.tokens for c in other]
    rows = [
        (*request.prompt_tokens, *completion.tokens)
        for request, completion in zip(requests, once, strict=True)
    ]
    for row, completion in zip(
        served.pair.sampler().compute_logprobs(rows, temperature=1.0), once, strict=True
    ):
        assert completion.rollout_logprobs == pytest.approx(
            row[-len(completion.tokens) :], abs=TOLERANCE
        )


def test_stop_text_ends_a_completion_and_is_part_of_it(served: Served) -> None:
    request = make_requests([[3, 4, 5]], SamplingConfig(temperature=0, max_tokens=30))
    (uninterrupted,) = served.sampler.sample(request)
    text = "abcdefghijklmnopqrstuvwxyz0123456789.,;"[uninterrupted.tokens[2] - 2]
    stopping = [replace(request[0], sampling=replace(request[0].sampling, stop=(text,)))]
    (stopped,) = served.sampler.sample(stopping)
    assert stopped.finish_reason == FinishReason.STOP_TEXT
    assert tuple(stopped.tokens) == served.pair.sampler().sample(stopping)[0].tokens


def test_request_that_vllm_refuses_affects_neither_the_server_nor_other_requests(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The sampler would refuse it first, if it knew the limit of the server.
    monkeypatch.setattr(served.sampler, "_spec", replace(served.sampler._spec, max_length=1000))
    requests = make_requests([*make_prompts(3), [5] * 300], GREEDY)
    restarts = served.sampler.num_restarts

    async def sample_all() -> list[Completion | BaseException]:
        coroutines = map(served.sampler.sample_one, requests)
        return await asyncio.gather(*coroutines, return_exceptions=True)

    *completions, refused = asyncio.run(sample_all())
    assert isinstance(refused, RefusedRequestError)
    assert "rollout replica 0: vLLM refuses request 3: " in str(refused)
    assert completions == served.sampler.sample(requests[:3])
    # In one call, the requests before it are dropped.
    with pytest.raises(RefusedRequestError, match="vLLM refuses request 3"):
        served.sampler.sample(requests)
    assert completions == served.sampler.sample(requests[:3])
    assert served.sampler.num_restarts == restarts


def test_request_that_its_caller_gives_up_is_aborted(served: Served) -> None:
    given_up, other = make_requests(make_prompts(2), LONG)
    expected = served.sampler.sample([other])

    async def give_up() -> Completion:
        tasks = [asyncio.create_task(served.sampler.sample_one(each)) for each in (given_up, other)]
        await asyncio.sleep(0.05)  # one of them may be open or finished by now
        tasks[0].cancel()
        return await tasks[1]

    assert [asyncio.run(give_up())] == expected
    served.publish_next()  # refused while a request is open


def test_damaged_bucket_is_refused_and_the_old_weights_stay(served: Served) -> None:
    version = served.sampler.weight_version
    before = served.sampler.sample(make_requests(make_prompts(2), GREEDY))
    served.perturb(5)
    buckets = served.write_buckets(version + 1, bucket_bytes=4096)
    data = torch.from_file(
        str(buckets[-1].path), shared=True, size=buckets[-1].num_bytes, dtype=torch.uint8
    )
    data[3] ^= 1
    with pytest.raises(WeightError, match=r"rollout replica 0: .* arrived damaged"):
        served.sampler.load(
            lambda replica: replica.call("load_files", buckets, version + 1), version=version + 1
        )
    assert served.sampler.sample(make_requests(make_prompts(2), GREEDY)) == before
    served.publish_next()


def test_interrupted_completions_continue_under_new_weights_with_token_versions(
    served: Served,
) -> None:
    sampler = AsyncSampler(served.sampler, interrupts=True)
    old, first = served.pair.sampler(), served.sampler.weight_version
    requests = make_requests(make_prompts(16, seed=9), LONG, seeds=range(16))

    async def publish_while_sampling() -> list[Completion]:
        cohort = Cohort(num_open=len(requests))
        sampling = asyncio.gather(
            *(sampler.sample(each, cohort=cohort, index=i) for i, each in enumerate(requests))
        )
        while not sampling.done() and sampler.num_resumed == 0:
            await asyncio.sleep(0.3)
            await sampler.pause()
            if sampler.num_resumed > 0:
                served.perturb(11)
                served.publish_next()
            sampler.resume()
        return await sampling

    completions = asyncio.run(publish_while_sampling())
    new = served.pair.sampler()
    mixed = [c for c in completions if c.token_versions]
    assert mixed
    for request, completion in zip(requests, completions, strict=True):
        cut = completion.token_versions.count(first)
        row = (*request.prompt_tokens, *completion.tokens)
        start = len(request.prompt_tokens) - 1
        expected = (
            old.compute_logprobs([row], temperature=1.0)[0][start:][:cut]
            + new.compute_logprobs([row], temperature=1.0)[0][start:][cut:]
        )
        if completion.token_versions:
            assert completion.rollout_logprobs == pytest.approx(expected, abs=LONG_TOLERANCE)


class PublishesAfter:
    """Interrupts every completion after some tokens, and publishes weights before they continue."""

    def __init__(self, served: Served, *, num_tokens: int, num_requests: int) -> None:
        self._served = served
        self._num_tokens = num_tokens
        self._barrier = asyncio.Barrier(num_requests)
        self._interrupted: set[int] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._served.sampler, name)

    async def sample_one(
        self, request: SamplingRequest, *, on_server: Callable[[int], None] | None = None
    ) -> Completion:
        if request.request_id in self._interrupted:
            return await self._served.sampler.sample_one(request, on_server=on_server)
        self._interrupted.add(request.request_id)
        short = replace(request, sampling=replace(request.sampling, max_tokens=self._num_tokens))
        completion = await self._served.sampler.sample_one(short, on_server=on_server)
        if await self._barrier.wait() == 0:
            self._served.publish_next()
        await self._barrier.wait()
        return replace(completion, finish_reason=FinishReason.INTERRUPTED)


def test_stop_text_is_found_across_a_weight_sync(served: Served) -> None:
    greedy = make_requests(make_prompts(6, seed=4), SamplingConfig(temperature=0, max_tokens=30))
    tokenizer, hf = make_tokenizer(), served.pair.sampler()
    requests = [
        replace(
            request,
            sampling=replace(
                request.sampling, stop=(str(tokenizer.decode(completion.tokens[2:5])),)
            ),
        )
        for request, completion in zip(greedy, hf.sample(greedy), strict=True)
        if len(completion.tokens) > 5
    ]
    expected = hf.sample(requests)
    requests = [each for each, end in zip(requests, expected, strict=True) if len(end.tokens) == 5]
    assert requests
    first = served.sampler.weight_version

    async def sample_all() -> list[Completion]:
        publishing = PublishesAfter(served, num_tokens=3, num_requests=len(requests))
        sampler = AsyncSampler(publishing, interrupts=True, tokenizer=tokenizer)  # type: ignore[arg-type]
        cohort = Cohort(num_open=len(requests))
        return await asyncio.gather(
            *(sampler.sample(each, cohort=cohort, index=i) for i, each in enumerate(requests))
        )

    # The published weights are the same, so the tokens are those without an interruption.
    for completion, of_hf in zip(asyncio.run(sample_all()), hf.sample(requests), strict=True):
        assert list(completion.tokens) == list(of_hf.tokens)
        assert completion.finish_reason == FinishReason.STOP_TEXT
        assert list(completion.token_versions) == [first] * 3 + [first + 1] * 2
        assert completion.rollout_logprobs == pytest.approx(of_hf.rollout_logprobs, abs=TOLERANCE)


def test_restarted_server_gives_the_same_completions(served: Served) -> None:
    requests = make_requests(make_prompts(12), LONG, seeds=range(12))
    uninterrupted = served.sampler.sample(requests)
    (replica,) = served.sampler.replicas
    assert isinstance(replica, ServerProcess)
    process = replica.process_id
    assert process is not None
    threading.Timer(0.05, lambda: os.killpg(process, signal.SIGKILL)).start()
    restarts = served.sampler.num_restarts
    again = served.sampler.sample(requests)
    if served.sampler.num_restarts == restarts:  # it was quicker than the kill
        again = served.sampler.sample(requests)
    assert served.sampler.num_restarts == restarts + 1
    assert [c.tokens for c in again] == [c.tokens for c in uninterrupted]


def test_server_that_cannot_start_shows_the_end_of_its_log(
    serve: Serve, pairs: Pairs, tmp_path: Path
) -> None:
    with pytest.raises(
        RuntimeError, match=r"(?s)rollout replica 0 .*replica-0\.log.*tensor_parallel_size"
    ):
        serve(pairs.get("qwen3_wide"), more={"tensor_parallel_size": 3})  # 4 heads do not divide
