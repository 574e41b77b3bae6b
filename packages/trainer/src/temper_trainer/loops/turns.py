"""Rollouts of several turns: the sampler writes, the environment answers, until every rollout is done. Tokens are never made from text."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment.protocol import Environment, EnvironmentFactory
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.types import Completion, FinishReason, Prompt, SamplingRequest, Score, Turn

MAX_THREADS = 16
"""Tools that run at once."""


@dataclass(slots=True)
class Conversation:
    """One rollout while it grows."""

    request: SamplingRequest
    """Its first."""
    environment: Environment | None
    """What answers; None ends every rollout after one completion."""
    first: Completion | None = None
    """What the policy said first."""
    turns: list[Turn] = field(default_factory=list)
    """What followed."""
    pending: tuple[int, ...] = ()
    """What the environment said and the policy has not yet answered."""
    is_done: bool = False
    """Whether nothing follows."""
    reward: float = 0.0
    """From the environment."""

    @property
    def completions(self) -> list[Completion]:
        """All of them, in order."""
        return [] if self.first is None else [self.first, *(turn.completion for turn in self.turns)]

    @property
    def tokens(self) -> list[int]:
        """Everything after the prompt that the next completion follows."""
        said = [] if self.first is None else list(self.first.tokens)
        for turn in self.turns:
            said += [*turn.observation, *turn.completion.tokens]
        return said

    def add(self, completion: Completion) -> None:
        """The policy's next words."""
        if self.first is None:
            self.first = completion
        else:
            self.turns.append(Turn(observation=self.pending, completion=completion))
        self.pending = ()


def rewards_of(scores: Sequence[Score], *, talks: Sequence[Conversation]) -> list[float | None]:
    """Of each rollout, its score and what its environment gave; None where the score failed."""
    return [
        None if score.reward is None else score.reward + talk.reward
        for score, talk in zip(scores, talks, strict=True)
    ]


def all_tokens(talks: Sequence[Conversation]) -> list[list[int]]:
    """Of each rollout, the prompt's tokens and everything after it."""
    return [[*talk.request.prompt_tokens, *talk.tokens] for talk in talks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a rollout."""

    max_turns: int
    """Completions."""
    max_tokens: int
    """After the prompt."""
    stop: str
    """Text that ends a completion because a call follows from it."""


def complete(
    rooms: Rooms, requests: Sequence[SamplingRequest], *, prompts: Sequence[Prompt]
) -> tuple[list[Conversation], dict[str, float]]:
    """Every request to its end, each with its prompt: one completion, or, where the run has an environment, as many turns as it takes."""
    config = rooms.config.environment
    if config is None or rooms.make_environment is None:
        completions = rooms.sampler.sample(requests)
        return [
            Conversation(request=r, environment=None, first=c)
            for r, c in zip(requests, completions, strict=True)
        ], {}
    longest = config.longest(max(request.sampling.max_tokens for request in requests))
    limits = Limits(max_turns=config.max_turns, max_tokens=longest, stop=config.call_end)
    return converse(
        rooms.sampler, requests, prompts=prompts, make=rooms.make_environment, limits=limits
    )


def converse(
    sampler: Sampler,
    requests: Sequence[SamplingRequest],
    *,
    prompts: Sequence[Prompt],
    make: EnvironmentFactory,
    limits: Limits,
) -> tuple[list[Conversation], dict[str, float]]:
    """Every rollout to its end, all that are open sampled together in each turn.

    Args:
        sampler: makes completions.
        requests: the first turn's, one for each rollout; later turns derive their seeds from these.
        prompts: of the requests, for the environments.
        make: makes the environment of one rollout.
        limits: when a rollout ends although its environment goes on.

    Returns:
        Conversations in the order of the requests, and counts of turns and tool calls.
    """
    talks = []
    for request, prompt in zip(requests, prompts, strict=True):
        environment = make()
        environment.reset(prompt)
        talks.append(Conversation(request=request, environment=environment))
    counts: dict[str, float] = {}
    for turn in range(limits.max_turns):
        open_ones = [talk for talk in talks if not talk.is_done]
        if not open_ones:
            break
        asked = [
            _next_request(talk, turn=turn, place=i, limits=limits)
            for i, talk in enumerate(open_ones)
        ]
        for talk, completion in zip(open_ones, sampler.sample(asked), strict=True):
            talk.add(completion)
        answer = partial(_answer, is_last=turn == limits.max_turns - 1, limits=limits)
        with ThreadPoolExecutor(max_workers=MAX_THREADS) as pool:
            for found in pool.map(answer, open_ones):
                for name, count in found.items():
                    counts[name] = counts.get(name, 0.0) + count
    turns = [len(talk.completions) for talk in talks]
    return talks, {
        **counts,
        "rollout/turns_mean": sum(turns) / len(turns),
        "rollout/turns_max": float(max(turns)),
    }


def _next_request(talk: Conversation, *, turn: int, place: int, limits: Limits) -> SamplingRequest:
    base = talk.request
    said = (*talk.tokens, *talk.pending)
    sampling = _within(base.sampling, stop=limits.stop, left=limits.max_tokens - len(said))
    seed = base.seed if turn == 0 else derive_seed(base.seed, "turn", turn)
    return replace(
        base,
        request_id=place,
        prompt_tokens=(*base.prompt_tokens, *said),
        sampling=sampling,
        seed=seed,
    )


def _within(sampling: SamplingConfig, *, stop: str, left: int) -> SamplingConfig:
    return replace(sampling, stop=(*sampling.stop, stop), max_tokens=min(sampling.max_tokens, left))


def _answer(talk: Conversation, *, is_last: bool, limits: Limits) -> dict[str, float]:
    """The environment's word on the last completion, and whether the rollout goes on."""
    completion = talk.completions[-1]
    assert talk.environment is not None
    observation = talk.environment.step(completion.tokens)
    talk.reward += observation.reward
    # One token at least must be left for the policy to say.
    has_room = len(talk.tokens) + len(observation.tokens) < limits.max_tokens
    talk.is_done = (
        is_last
        or observation.is_done
        or not has_room
        or completion.finish_reason == FinishReason.END_TOKEN
    )
    talk.pending = () if talk.is_done else observation.tokens
    return observation.metrics
