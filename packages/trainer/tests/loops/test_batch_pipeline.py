"""Batches that are sampled ahead: no rollout is dropped, and none is older than allowed."""

import math
import random
from collections.abc import Sequence

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


def test_trained_lengths_have_the_distribution_of_the_sampled_ones() -> None:
    trained = train_batches(
        AdmissionRule(max_staleness=2, overlaps=True),
        num_steps=21,
        batch_size=1000,
        max_concurrent=500,
        token_s=1e-3,
    )
    batches = [sorted(len(each.tokens) for each in batch) for _, batch in trained]
    lengths = [length for batch in batches for length in batch]
    assert len(lengths) >= 20_000
    assert is_unbiased(lengths)
    # A planted bias must be found: every batch without its longest 3 %.
    assert not is_unbiased([length for batch in batches for length in batch[:970]])
