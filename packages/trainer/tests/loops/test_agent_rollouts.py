"""Rollouts of agents: their requests become samples, and each sampled token is trained once."""

import asyncio
import contextlib
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from temper_engine_api.errors import WeightError
from temper_trainer.algorithms.adaptive_coefficients import build_kl_controller
from temper_trainer.batching.samples import to_samples
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.config_loading import load
from temper_trainer.environment.protocol import (
    AgentOutcome,
    InvalidAnswerError,
    RolloutLimitError,
    SampleFunction,
)
from temper_trainer.loops.advantage_columns import add_advantages
from temper_trainer.loops.rollouts.multi_turn import Conversation
from temper_trainer.loops.rollouts.rollout_scheduler import (
    EnvironmentTimeoutError,
    IdleAgentError,
    RolloutScheduler,
)
from temper_trainer.rollout.completion_record import CompletionRecorder, CompletionReplay
from temper_trainer.rollout.scripted_sampler import ScriptedSampler, ScriptedServer
from temper_trainer.types import Completion, Prompt, Rollout, SamplingRequest

END = 0
Run = Callable[[Prompt, SampleFunction], Awaitable[float]]


class Agent:
    """Runs a function."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def run_agent(self, prompt: Prompt, *, sample: SampleFunction) -> AgentOutcome:
        return AgentOutcome(reward=await self._run(prompt, sample))


def complete_with_next_number(request: SamplingRequest) -> list[int]:
    """Return a completion that says how long its prompt is."""
    return [100 + len(request.prompt_tokens), END]


def run_agents(
    run: Run,
    *,
    num_rollouts: int = 1,
    sampler: ScriptedSampler | None = None,
    max_turns: int = 4,
    max_tokens: int = 40,
    max_concurrent: int = 16,
    step_timeout_s: float | None = None,
    max_failure_fraction: float = 0.0,
    vocab_size: int | None = None,
    recorder: CompletionRecorder | None = None,
    replay: CompletionReplay | None = None,
) -> tuple[list[Conversation], dict[str, float]]:
    config = EnvironmentConfig(
        name="some:Agent",
        max_turns=max_turns,
        max_tokens=max_tokens,
        max_concurrent=max_concurrent,
        step_timeout_s=step_timeout_s,
        max_failure_fraction=max_failure_fraction,
    )
    prompts = [Prompt(prompt_id=i, text="", tokens=(1, 2), answer="") for i in range(num_rollouts)]
    requests = [
        SamplingRequest(
            request_id=i, prompt_tokens=(1, 2), sampling=SamplingConfig(max_tokens=8), seed=i
        )
        for i in range(num_rollouts)
    ]
    with RolloutScheduler(
        sampler or ScriptedSampler(complete_with_next_number, end_token_id=END),
        environment=config,
        make_environment=lambda: Agent(run),
        vocab_size=vocab_size,
        recorder=recorder,
        replay=replay,
    ) as scheduler:
        return scheduler.run(scheduler.run_rollouts(requests, prompts=prompts))


def make_rollout(conversation: Conversation, *, reward: float, sample: int) -> Rollout:
    assert conversation.first is not None
    return Rollout(
        prompt=Prompt(prompt_id=0, text="", tokens=conversation.request.prompt_tokens, answer=""),
        completion=conversation.first,
        turns=tuple(conversation.turns),
        branches=conversation.branches,
        text="",
        reward=reward,
        group_id=0,
        sample_id=sample,
    )


async def append_and_rewrite(prompt: Prompt, sample: SampleFunction) -> float:
    """Request two turns of one conversation, and one of another."""
    first = await sample((7, 8))
    await sample((7, 8, *first.tokens, 9))
    await sample((7, 9))
    return 0.5


def test_turns_are_joined_where_tokens_are_equal_and_split_where_history_changed() -> None:
    (conversation,), metrics = run_agents(append_and_rewrite)
    samples = to_samples([make_rollout(conversation, reward=1.0, sample=3)], temperature=1.0)
    # The history of the last completion is the conversation.
    assert samples.tokens.tolist() == [7, 9, 102, END, 7, 8, 102, END, 9, 105, END]
    assert samples.sequence_starts.tolist() == [0, 4, 11]
    trained = [False, False, True, True]
    assert samples.loss_mask.tolist() == [*trained, *trained, False, True, True]
    assert samples.sample_ids.tolist() == [3, 4]
    assert conversation.rewards == [0.5]
    assert metrics["agent/requests"] == 3
    assert metrics["agent/branches"] == 1


def test_request_that_was_cancelled_is_not_trained_and_cancelled_again_in_a_replay(
    tmp_path: Path,
) -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await sample((5,))
        await sample((6,), max_tokens=1)
        return 0.0

    server = ScriptedServer(
        lambda request: [3] * 5 if request.prompt_tokens == (5,) else [4],
        end_token_id=END,
        token_s=0.05,
        max_concurrent=4,
    )
    path = tmp_path / "completions.jsonl"
    (conversation,), _ = run_agents(run, sampler=server, recorder=CompletionRecorder(path))
    assert [list(each.tokens) for each in conversation.completions] == [[4]]
    replay = CompletionReplay(path, needs_experts=False)
    (replayed,), _ = run_agents(run, replay=replay)
    assert replayed.completions == conversation.completions


def test_request_that_is_repeated_after_a_timeout_gets_the_pending_completion() -> None:
    requests: list[SamplingRequest] = []

    def script(request: SamplingRequest) -> list[int]:
        requests.append(request)
        return [3] * (5 if len(requests) == 1 else 1)

    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await sample((5,))
        assert len((await sample((5,))).tokens) == 5
        # Nothing is pending any more.
        assert len((await sample((5,))).tokens) == 1
        return 0.0

    server = ScriptedServer(script, end_token_id=END, token_s=0.05, max_concurrent=4)
    # The repeated request is no further turn.
    (conversation,), metrics = run_agents(run, sampler=server, max_turns=2)
    assert len(conversation.branches) == 1
    assert metrics["agent/repeated_requests"] == 2.0
    first, other = (each.seed for each in requests)
    assert first != other


def test_each_of_several_equal_requests_that_were_given_up_is_pending() -> None:
    lengths = iter([5, 6])

    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.gather(sample((5,)), sample((5,)))
        both = await asyncio.gather(sample((5,)), sample((5,)))
        assert sorted(len(each.tokens) for each in both) == [5, 6]
        return 0.0

    server = ScriptedServer(
        lambda _: [3] * next(lengths), end_token_id=END, token_s=0.02, max_concurrent=4
    )
    run_agents(run, sampler=server)


def test_completion_that_was_finished_but_not_read_is_given_up_again_in_a_replay(
    tmp_path: Path,
) -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await sample((5,))
        await asyncio.sleep(0.2)  # it is finished meanwhile
        await sample((6,))
        return 0.0

    server = ScriptedServer(lambda _: [3, END], end_token_id=END, token_s=0.02, max_concurrent=4)
    path = tmp_path / "completions.jsonl"
    (conversation,), _ = run_agents(run, sampler=server, recorder=CompletionRecorder(path))
    assert len(conversation.completions) == 1
    replay = CompletionReplay(path, needs_experts=False)
    (replayed,), _ = run_agents(run, replay=replay)
    assert replayed.completions == conversation.completions


class DamagedWeights(ScriptedSampler):
    """A scripted sampler whose weights are damaged."""

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        raise WeightError("the log-probs are not finite.")


def test_error_of_the_sampler_ends_the_run_although_the_agent_catches_it() -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        with contextlib.suppress(WeightError):
            await sample((5,))
        return 0.0

    with pytest.raises(WeightError, match="not finite"):
        run_agents(run, sampler=DamagedWeights(lambda _: [3], end_token_id=END))


@pytest.mark.parametrize(
    ("tokens", "message"), [((5,), "environment.max_turns"), ((5,) * 42, "environment.max_tokens")]
)
def test_limit_ends_a_rollout_without_failing_it(tokens: Sequence[int], message: str) -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        await sample((5,))
        with pytest.raises(RolloutLimitError, match=message) as caught:
            await sample(tokens)
        raise caught.value

    (conversation,), metrics = run_agents(run, max_turns=1 if len(tokens) == 1 else 2)
    assert conversation.failure is None
    assert len(conversation.completions) == 1
    assert metrics["agent/over_limit"] == 1


def test_completions_are_as_long_as_the_shortest_limit() -> None:
    lengths = []

    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        for tokens, max_tokens in (((1,), None), ((1,), 5), ((1,) * 39, None)):
            lengths.append(len((await sample(tokens, max_tokens=max_tokens)).tokens))
        return 0.0

    run_agents(run, sampler=ScriptedSampler(lambda _: [3] * 20, end_token_id=END))
    # sampling.max_tokens, the agent's limit, and the two tokens of the row's prompt and 40.
    assert lengths == [8, 5, 3]


def test_agents_that_wait_for_their_turn_do_not_hold_up_the_others() -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        await asyncio.gather(sample((prompt.prompt_id,)), sample((prompt.prompt_id, 9)))
        return 0.0

    conversations, metrics = run_agents(run, num_rollouts=5, max_concurrent=2)
    assert [len(each.completions) for each in conversations] == [2] * 5
    assert metrics["agent/requests"] == 10


def test_time_limit_counts_the_agent_and_not_the_sampler() -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        await sample((5,))
        if prompt.prompt_id:
            await asyncio.sleep(30)
        return 0.0

    server = ScriptedServer(lambda _: [4], end_token_id=END, token_s=0.3, max_concurrent=4)
    run_agents(run, sampler=server, step_timeout_s=0.2)
    with pytest.raises(EnvironmentTimeoutError, match=r"step_timeout_s = 0.2 s"):
        run_agents(run, num_rollouts=2, sampler=server, step_timeout_s=0.2)


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit])
def test_agent_that_is_cancelled_or_exits_fails_only_its_own_rollout(
    error: type[BaseException],
) -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        await sample((5,))
        if prompt.prompt_id == 1:
            raise error
        return 1.0

    conversations, _ = run_agents(run, num_rollouts=3, max_failure_fraction=0.5)
    reasons = [each.failure or "" for each in conversations]
    assert [error.__name__ in reason for reason in reasons] == [False, True, False]


def test_agent_without_a_completion_has_failed() -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        return 1.0

    with pytest.raises(IdleAgentError, match="ended without a completion"):
        run_agents(run)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ((1, 50), r"of token 50: send ids of the run's tokenizer, 0 to 49\."),
        ((1, -1), r"of token -1: send ids"),
        ((1.5,), r"of \(1\.5,\): send ids"),
        ((), "of no tokens: send at least one"),
    ],
)
def test_request_that_no_sampler_could_answer_fails_only_its_rollout(
    tokens: tuple[int, ...], reason: str
) -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        if prompt.prompt_id == 0:
            await sample(tokens)
        await sample(prompt.tokens)
        return 1.0

    (failed, other), _ = run_agents(run, num_rollouts=2, max_failure_fraction=0.5, vocab_size=50)
    assert re.search(reason, failed.failure or "")
    assert other.failure is None
    assert other.rewards == [1.0]


def test_agent_may_send_back_sampled_ids_that_the_tokenizer_does_not_have() -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        first = await sample(prompt.tokens)
        assert max(first.tokens) >= 50
        await sample((*prompt.tokens, *first.tokens, 7))
        return 1.0

    (conversation,), _ = run_agents(run, vocab_size=50)
    assert len(conversation.turns) == 1


def test_agent_without_a_finite_reward_has_failed() -> None:
    async def run(prompt: Prompt, sample: SampleFunction) -> float:
        await sample(prompt.tokens)
        return math.nan

    with pytest.raises(InvalidAnswerError, match="reward nan"):
        run_agents(run)


def test_branches_have_the_advantage_of_their_rollout_and_do_not_count_in_its_group() -> None:
    agents, _ = run_agents(append_and_rewrite, num_rollouts=2)
    rollouts = [
        make_rollout(each, reward=reward, sample=i)
        for i, (each, reward) in enumerate(zip(agents, (1.0, 0.0), strict=True))
    ]
    rollouts[0] = replace(rollouts[0], branches=())
    config = load(["experiment=quickstart", "algorithm.advantage=dr_grpo"]).config
    samples, _, _ = add_advantages(
        to_samples(rollouts, temperature=1.0),
        rollouts=rollouts,
        parents=[0, 1, 1],
        config=config,
        kl_controller=build_kl_controller(config.algorithm),
    )
    advantages = samples.columns["advantages"]
    # The group has the rewards 1 and 0. Counted by samples, they would be 1, 0 and 0.
    by_sample = [part[part != 0].unique().tolist() for part in advantages.split([4, 4, 7])]
    assert by_sample == [[0.5], [-0.5], [-0.5]]
    assert torch.equal(advantages != 0, samples.loss_mask)
