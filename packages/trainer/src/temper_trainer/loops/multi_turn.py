"""Run rollouts to their end: one completion, or several turns with an environment.

With an environment, completions of the sampler and answers of the environment alternate. The tokens
of later turns are appended to those that were sampled; text is never tokenized again, because that
could give other tokens than the policy sampled.

A concurrent sampler, such as vLLM, gets the next request of a rollout as soon as its environment
has answered, so no rollout waits for another one. Other samplers get the requests of a turn
together, because their batches, and with them rounding, would depend on which tool was faster.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment.protocol import Environment, EnvironmentFactory
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.types import Completion, FinishReason, Prompt, SamplingRequest, Score, Turn

MAX_ROLLOUT_THREADS = 1024
"""Maximum number of rollouts that a concurrent sampler completes at the same time."""


@dataclass(slots=True)
class Conversation:
    """A rollout in progress."""

    request: SamplingRequest
    """Request of the first completion."""
    environment: Environment | None
    """Answers completions; None for single-turn rollouts."""
    first: Completion | None = None
    """The first completion."""
    turns: list[Turn] = field(default_factory=list)
    """The following turns."""
    pending: tuple[int, ...] = ()
    """Tokens of the environment's last answer, which no completion follows yet."""
    is_done: bool = False
    """True if no completion follows."""
    rewards: list[float] = field(default_factory=list)
    """The environment's reward of each completion."""

    @property
    def reward(self) -> float:
        """Sum of the environment's rewards."""
        return sum(self.rewards)

    @property
    def completions(self) -> list[Completion]:
        """All completions in order."""
        return [] if self.first is None else [self.first, *(turn.completion for turn in self.turns)]

    @property
    def tokens(self) -> list[int]:
        """Tokens after the prompt, without pending ones."""
        tokens = [] if self.first is None else list(self.first.tokens)
        for turn in self.turns:
            tokens += [*turn.observation, *turn.completion.tokens]
        return tokens

    @property
    def full_tokens(self) -> list[int]:
        """Tokens of the prompt and everything after it."""
        return [*self.request.prompt_tokens, *self.tokens]

    def add(self, completion: Completion) -> None:
        """Add the completion that follows the pending tokens."""
        if self.first is None:
            self.first = completion
        else:
            self.turns.append(Turn(observation=self.pending, completion=completion))
        self.pending = ()


def add_environment_rewards(
    scores: Sequence[Score], *, conversations: Sequence[Conversation]
) -> list[float | None]:
    """Return the score of each rollout plus its environment's rewards; None if scoring failed."""
    return [
        None if score.reward is None else score.reward + conversation.reward
        for score, conversation in zip(scores, conversations, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """When a rollout ends even if its environment would continue."""

    max_turns: int
    """Maximum number of completions."""
    max_tokens: int
    """Maximum number of tokens after the prompt."""
    stop: str
    """Text at the end of a tool call, with which a completion stops."""


def complete_rollouts(
    requests: Sequence[SamplingRequest],
    *,
    prompts: Sequence[Prompt],
    sampler: Sampler,
    config: EnvironmentConfig | None,
    make_environment: EnvironmentFactory | None,
) -> tuple[list[Conversation], dict[str, float]]:
    """Run every rollout to its end: one completion without an environment, else several turns.

    Args:
        requests: The first request of each rollout.
        prompts: The prompt of each request.
        sampler: Samples the completions.
        config: Configuration of the environments; None for single-turn rollouts.
        make_environment: Makes the environment of a rollout; None for single-turn rollouts.

    Returns:
        Conversations in the order of the requests, and metrics of turns and tools.
    """
    if config is None or make_environment is None:
        completions = sampler.sample(requests)
        return [
            Conversation(request=request, environment=None, first=completion)
            for request, completion in zip(requests, completions, strict=True)
        ], {}
    max_tokens = config.max_rollout_tokens(max(request.sampling.max_tokens for request in requests))
    limits = RolloutLimits(max_turns=config.max_turns, max_tokens=max_tokens, stop=config.call_end)
    return run_conversations(
        sampler,
        requests,
        prompts=prompts,
        make_environment=make_environment,
        limits=limits,
        max_concurrent=config.max_concurrent,
    )


def run_conversations(
    sampler: Sampler,
    requests: Sequence[SamplingRequest],
    *,
    prompts: Sequence[Prompt],
    make_environment: EnvironmentFactory,
    limits: RolloutLimits,
    max_concurrent: int,
) -> tuple[list[Conversation], dict[str, float]]:
    """Run multi-turn rollouts to their end.

    Args:
        sampler: Samples the completions.
        requests: The first request of each rollout; seeds of later turns are derived from it.
        prompts: The prompt of each request.
        make_environment: Makes the environment of a rollout.
        limits: When a rollout ends even if its environment would continue.
        max_concurrent: Maximum number of environments that answer at the same time.

    Returns:
        Conversations in the order of the requests, and metrics of turns and tools.
    """
    conversations = []
    for request, prompt in zip(requests, prompts, strict=True):
        environment = make_environment()
        environment.reset(prompt)
        conversations.append(Conversation(request=request, environment=environment))
    run = _run_concurrently if sampler.is_concurrent else _run_turn_by_turn
    counts = run(conversations, sampler=sampler, limits=limits, max_concurrent=max_concurrent)
    num_turns = [len(conversation.completions) for conversation in conversations]
    return conversations, {
        **counts,
        "rollout/turns_mean": sum(num_turns) / len(num_turns),
        "rollout/turns_max": float(max(num_turns)),
    }


def _run_turn_by_turn(
    conversations: Sequence[Conversation],
    *,
    sampler: Sampler,
    limits: RolloutLimits,
    max_concurrent: int,
) -> dict[str, float]:
    """Sample each turn of all unfinished rollouts together; return the environments' counts."""
    counts: dict[str, float] = {}
    for turn in range(limits.max_turns):
        active = [conversation for conversation in conversations if not conversation.is_done]
        if not active:
            break
        turn_requests = [
            _make_request(conversation, turn=turn, request_id=i, limits=limits)
            for i, conversation in enumerate(active)
        ]
        for conversation, completion in zip(active, sampler.sample(turn_requests), strict=True):
            conversation.add(completion)
        step = partial(_step_environment, is_last=turn == limits.max_turns - 1, limits=limits)
        # Threads, because tools wait for processes and servers.
        with ThreadPoolExecutor(max_workers=max_concurrent) as pool:
            # `map` yields in the order of the rollouts, so float sums do not depend on which tool
            # was faster.
            _add_counts(counts, pool.map(step, active))
    return counts


def _run_concurrently(
    conversations: Sequence[Conversation],
    *,
    sampler: Sampler,
    limits: RolloutLimits,
    max_concurrent: int,
) -> dict[str, float]:
    """Run each rollout in its own thread; return the environments' counts.

    The threads mostly wait for the sampler and for tools.

    Raises:
        TemperError: The error of a rollout. The other rollouts end after their present turn.
    """
    environments = threading.BoundedSemaphore(max_concurrent)
    is_stopped = threading.Event()

    def run(index: int) -> dict[str, float]:
        conversation, counts = conversations[index], dict[str, float]()
        try:
            for turn in range(limits.max_turns):
                if conversation.is_done or is_stopped.is_set():
                    break
                request = _make_request(conversation, turn=turn, request_id=index, limits=limits)
                (completion,) = sampler.sample([request])
                conversation.add(completion)
                with environments:
                    is_last = turn == limits.max_turns - 1
                    metrics = _step_environment(conversation, is_last=is_last, limits=limits)
                _add_counts(counts, [metrics])
        except BaseException:
            is_stopped.set()
            raise
        return counts

    pool = ThreadPoolExecutor(
        min(len(conversations), MAX_ROLLOUT_THREADS), thread_name_prefix="rollout"
    )
    counts: dict[str, float] = {}
    try:
        # In the order of the rollouts, so that float sums do not depend on which one was faster.
        _add_counts(counts, pool.map(run, range(len(conversations))))
    except BaseException:
        # Also a request to stop the run, which must not wait for completions and tools in progress.
        is_stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return counts


def _add_counts(counts: dict[str, float], metrics: Iterable[Mapping[str, float]]) -> None:
    for each in metrics:
        for name, count in each.items():
            counts[name] = counts.get(name, 0.0) + count


def _make_request(
    conversation: Conversation, *, turn: int, request_id: int, limits: RolloutLimits
) -> SamplingRequest:
    first = conversation.request
    tokens = (*conversation.tokens, *conversation.pending)
    sampling = _limit_sampling(
        first.sampling, stop=limits.stop, max_tokens=limits.max_tokens - len(tokens)
    )
    # Derived from the request, so that draws do not depend on which rollouts are still active.
    seed = first.seed if turn == 0 else derive_seed(first.seed, "turn", turn)
    return replace(
        first,
        request_id=request_id,
        prompt_tokens=(*first.prompt_tokens, *tokens),
        sampling=sampling,
        seed=seed,
        # The replica of the first turn has the beginning of the conversation in its prefix cache.
        session=hash(first.prompt_tokens) if first.session is None else first.session,
    )


def _limit_sampling(sampling: SamplingConfig, *, stop: str, max_tokens: int) -> SamplingConfig:
    max_tokens = min(sampling.max_tokens, max_tokens)
    return replace(sampling, stop=(*sampling.stop, stop), max_tokens=max_tokens)


def _step_environment(
    conversation: Conversation, *, is_last: bool, limits: RolloutLimits
) -> dict[str, float]:
    """Pass the last completion to the environment, and decide whether the rollout continues."""
    completion = conversation.completions[-1]
    assert conversation.environment is not None
    # Also after the last turn, because the environment rewards the final completion.
    observation = conversation.environment.step(completion.tokens)
    conversation.rewards.append(observation.reward)
    # After the observation, at least one token must be left for the next completion.
    num_tokens = len(conversation.tokens) + len(observation.tokens)
    conversation.is_done = (
        is_last
        or observation.is_done
        or num_tokens >= limits.max_tokens
        # The policy ended its answer itself; a tool call would have ended with the stop text.
        or completion.finish_reason == FinishReason.END_TOKEN
    )
    conversation.pending = () if conversation.is_done else observation.tokens
    return observation.metrics
