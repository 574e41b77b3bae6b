"""One rollout: a completion, or several turns with an environment.

With an environment, completions of the sampler and answers of the environment alternate. The tokens
of later turns are appended to the sampled tokens. Sampled text is never tokenized again, because
that could give different tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment.protocol import InvalidAnswerError, Observation
from temper_trainer.loops.run.seeds import derive_seed
from temper_trainer.metrics.timeline import RolloutTrace
from temper_trainer.types import Branch, Completion, FinishReason, SamplingRequest, Turn


@dataclass(slots=True)
class Conversation:
    """A rollout in progress."""

    request: SamplingRequest
    """Request of the first completion."""
    opening: tuple[int, ...] = ()
    """Tokens of the environment's first observation, which follow the prompt."""
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
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    """The environment's counts of each completion."""
    failure: str | None = None
    """Error of its environment, with which the rollout has no reward; else None."""
    num_retries: int = 0
    """Number of earlier attempts, whose environments failed."""
    trace: RolloutTrace = field(default_factory=RolloutTrace)
    """When the rollout was sampled, and when its environment answered."""
    branches: tuple[Branch, ...] = ()
    """Other histories of an agent. The conversation itself is the history of the last
    completion."""

    @property
    def is_given(self) -> bool:
        """True if its completion is the given one of the prompt."""
        return self.first is not None and self.first.is_given

    @property
    def reward(self) -> float:
        """Sum of the environment's rewards."""
        return sum(self.rewards)

    @property
    def completions(self) -> list[Completion]:
        """All completions in order, those of branches last."""
        if self.first is None:
            return []
        others = [completion for branch in self.branches for completion in branch.completions]
        return [self.first, *(turn.completion for turn in self.turns), *others]

    @property
    def tokens(self) -> list[int]:
        """Tokens after prompt and opening, without pending ones."""
        tokens = [] if self.first is None else list(self.first.tokens)
        for turn in self.turns:
            tokens += [*turn.observation, *turn.completion.tokens]
        return tokens

    @property
    def num_tokens(self) -> int:
        """Number of `tokens`."""
        num_first = 0 if self.first is None else len(self.first.tokens)
        return num_first + sum(
            len(turn.observation) + len(turn.completion.tokens) for turn in self.turns
        )

    @property
    def full_tokens(self) -> list[int]:
        """Tokens of the prompt and everything after it."""
        return [*self.request.prompt_tokens, *self.opening, *self.tokens]

    def add(self, completion: Completion) -> None:
        """Add the completion that follows the pending tokens."""
        if self.first is None:
            self.first = completion
        else:
            self.turns.append(Turn(observation=self.pending, completion=completion))
        self.pending = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """When a rollout ends even if its environment would continue."""

    max_turns: int
    """Maximum number of completions."""
    max_tokens: int
    """Maximum number of tokens after the prompt, with the opening."""
    stop: str
    """Text at the end of a tool call, with which a completion stops."""

    @classmethod
    def from_config(cls, config: EnvironmentConfig, sampling: SamplingConfig) -> "RolloutLimits":
        """Return the limits of a rollout whose completions are sampled with these settings."""
        return cls(
            max_turns=config.max_turns,
            max_tokens=config.compute_max_rollout_tokens(sampling.max_tokens),
            stop=config.call_end,
        )


def make_turn_request(
    conversation: Conversation, *, turn: int, request_id: int, limits: RolloutLimits
) -> SamplingRequest:
    """Return the request of a turn's completion; turns count from 0."""
    first = conversation.request
    tokens = (*conversation.opening, *conversation.tokens, *conversation.pending)
    sampling = _limit_sampling(
        first.sampling, stop=limits.stop, max_tokens=limits.max_tokens - len(tokens)
    )
    # Derived from the request, so that draws do not depend on which rollouts are still active.
    seed = first.seed if turn == 0 else derive_seed(first.seed, "turn", turn)
    return replace(
        first,
        request_id=request_id,
        prompt_tokens=_reuse_ids((*first.prompt_tokens, *tokens)),
        sampling=sampling,
        seed=seed,
        # The replica of the first turn has the beginning of the conversation in its prefix cache.
        session=hash(first.prompt_tokens) if first.session is None else first.session,
    )


_shared_ids: list[int] = []
"""The object of each token id of the prompts of requests; used by the event loop only."""


def _reuse_ids(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return equal token ids with one object per id: 8 bytes per token instead of 40.

    Ten thousand requests of later turns may be open, each with its full conversation.
    """
    if len(tokens) == 1:  # the getter of a single item would not return a tuple
        return tokens
    _shared_ids.extend(range(len(_shared_ids), max(tokens) + 1))
    shared: tuple[int, ...] = itemgetter(*tokens)(_shared_ids)
    return shared


def _limit_sampling(sampling: SamplingConfig, *, stop: str, max_tokens: int) -> SamplingConfig:
    max_tokens = min(sampling.max_tokens, max_tokens)
    return replace(sampling, stop=(*sampling.stop, stop), max_tokens=max_tokens)


def add_opening(
    conversation: Conversation, observation: Observation, *, limits: RolloutLimits
) -> None:
    """Add the environment's first observation, which the policy reads after the prompt.

    Raises:
        InvalidAnswerError: If it leaves no token for a completion, or belongs to a completion.
    """
    if observation.reward or observation.is_done:
        raise InvalidAnswerError(
            f"the first observation has reward {observation.reward:g} and is_done "
            f"{observation.is_done}, but no completion comes before it: return both from step."
        )
    if len(observation.tokens) >= limits.max_tokens:
        raise InvalidAnswerError(
            f"the first observation has {len(observation.tokens)} tokens, but a rollout may have "
            f"{limits.max_tokens} after its prompt: shorten it, or raise environment.max_tokens."
        )
    conversation.opening = observation.tokens
    conversation.metrics.append(observation.metrics)


def add_observation(
    conversation: Conversation, observation: Observation, *, is_last: bool, limits: RolloutLimits
) -> None:
    """Add the environment's answer to the last completion, and decide if the rollout continues."""
    conversation.rewards.append(observation.reward)
    conversation.metrics.append(observation.metrics)
    # After the observation, at least one token must be left for the next completion.
    num_tokens = len(conversation.opening) + conversation.num_tokens + len(observation.tokens)
    conversation.is_done = (
        is_last
        or observation.is_done
        or num_tokens >= limits.max_tokens
        # The policy ended its answer itself; a tool call would have ended with the stop text.
        or conversation.completions[-1].finish_reason == FinishReason.END_TOKEN
    )
    conversation.pending = () if conversation.is_done else observation.tokens


def measure_turns(conversations: Sequence[Conversation]) -> dict[str, float]:
    """Return the metrics of turns and tools, and the numbers of failures and retries."""
    num_turns = [len(conversation.completions) for conversation in conversations]
    counts: dict[str, float] = {}
    # Turn by turn, in the order of the rollouts: float sums must not depend on which one was
    # faster.
    for turn in range(max(len(conversation.metrics) for conversation in conversations)):
        for conversation in conversations:
            metrics = conversation.metrics[turn] if turn < len(conversation.metrics) else {}
            for name, count in metrics.items():
                counts[name] = counts.get(name, 0.0) + count
    return {
        **counts,
        "rollout/turns_mean": sum(num_turns) / len(num_turns),
        "rollout/turns_max": float(max(num_turns)),
        "rollout/failed": float(sum(each.failure is not None for each in conversations)),
        "rollout/retries": float(sum(each.num_retries for each in conversations)),
    }
