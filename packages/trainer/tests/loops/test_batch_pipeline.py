"""Batches that are sampled ahead: no rollout is dropped, and none is older than allowed."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.loops.rollouts.batch_pipeline import AdmissionRule, BatchPipeline
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.rollout.scripted_sampler import ScriptedServer
from temper_trainer.types import Completion, Prompt, SamplingRequest

MEDIAN_TOKENS, SIGMA = 40.0, 0.8


def draw_length(index: int) -> int:
    """Return the log-normal length of a rollout's completion, rounded up."""
    return math.ceil(random.Random(index).lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))


def make_requests(first: int, *, batch_size: int) -> tuple[list[SamplingRequest], list[Prompt]]:
    """Return requests of one-token prompts that are numbered from `first`, and these prompts."""
    requests = [
        SamplingRequest(
            request_id=i,
            prompt_tokens=(first + i,),
            sampling=SamplingConfig(max_tokens=10**6),
            seed=first + i,
        )
        for i in range(batch_size)
    ]
    prompts = [
        Prompt(prompt_id=i, text="", tokens=request.prompt_tokens, answer="")
        for i, request in enumerate(requests)
    ]
    return requests, prompts


def script(request: SamplingRequest) -> list[int]:
    """Return what is left of a completion, after a prompt of one token: the rollout's index."""
    return [1] * (draw_length(request.prompt_tokens[0]) - len(request.prompt_tokens) + 1)


def train_batches(
    rule: AdmissionRule,
    *,
    num_steps: int,
    batch_size: int,
    max_concurrent: int,
    token_s: float,
    interrupts: bool = True,
) -> list[tuple[int, list[Completion]]]:
    """Return the version of the weights before each step, and its batch."""
    server = ScriptedServer(script, end_token_id=0, token_s=token_s, max_concurrent=max_concurrent)
    server.load_weights([], version=1)
    trained = []
    with RolloutScheduler(
        server, max_sampling=2 * max_concurrent, interrupts=interrupts
    ) as scheduler:

        async def sample(step: int) -> list[Completion]:
            first = (step - 1) * batch_size
            requests, prompts = make_requests(first, batch_size=batch_size)
            conversations, _ = await scheduler.run_rollouts(
                requests, prompts=prompts, priority=step
            )
            return [each.completions[0] for each in conversations]

        pipeline = BatchPipeline(scheduler, sample, rule=rule, first_step=1, last_step=num_steps)
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
    overlaps=st.booleans(),
    interrupts=st.booleans(),
    batch_size=st.integers(1, 24),
    max_concurrent=st.integers(1, 16),
)
def test_no_token_is_older_than_the_limit_when_it_is_trained(
    max_staleness: int, overlaps: bool, interrupts: bool, batch_size: int, max_concurrent: int
) -> None:
    trained = train_batches(
        AdmissionRule(max_staleness=max_staleness, overlaps=overlaps),
        num_steps=6,
        batch_size=batch_size,
        max_concurrent=max_concurrent,
        token_s=1e-5,
        interrupts=interrupts,
    )
    for step, (version, batch) in enumerate(trained, start=1):
        first = (step - 1) * batch_size
        # Every rollout once, in the order of the prompts.
        assert [len(each.tokens) for each in batch] == [
            draw_length(index) for index in range(first, first + batch_size)
        ]
        for completion in batch:
            versions = completion.token_versions or (completion.weight_version,)
            assert version - max_staleness <= min(versions)
            assert max(versions) <= version
            assert completion.weight_version == min(versions)


def test_long_completions_are_continued_under_newer_weights() -> None:
    trained = train_batches(
        AdmissionRule(max_staleness=2, overlaps=True),
        num_steps=8,
        batch_size=64,
        max_concurrent=16,
        token_s=5e-4,
    )
    ages = [version - each.weight_version for version, batch in trained for each in batch]
    assert max(ages) == 2
    assert any(each.token_versions for _, batch in trained for each in batch)
