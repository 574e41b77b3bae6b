"""The interface of an environment, which is one object per rollout.

An environment gets tokens and returns tokens. Its methods may be coroutines, which all run in one
event loop, or functions, which run in threads. `temper_trainer.environment.text_environment` helps
to write one that exchanges text.
"""

import math
import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from temper_engine_api.errors import TemperError
from temper_trainer.types import Completion, Prompt


class BrokenEnvironmentError(TemperError, RuntimeError):
    """An environment failed for a reason that is not the policy's fault; the run stops."""


class InvalidAnswerError(TemperError, ValueError):
    """An environment returned what cannot be trained.

    It counts as a failed rollout; see ``environment.max_failure_fraction``.
    """


class RolloutLimitError(TemperError, RuntimeError):
    """An agent requested more completions or tokens than a rollout may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An environment's response to one completion.

    Example:
        >>> answer_of_a_tool = Observation(tokens=(17, 4, 9), metrics={"tool/calls": 1.0})
        >>> answer_of_a_tool.is_done, answer_of_a_tool.reward
        (False, 0.0)
    """

    tokens: tuple[int, ...] = ()
    """Token ids appended after the completion. They are not trained. May be empty."""
    is_done: bool = False
    """True if the rollout ends here; `tokens` are not appended then."""
    reward: float = 0.0
    """Added to the rollout's score."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts of this step, summed over all rollouts of an RL step."""


class Environment(Protocol):
    """The environment of one rollout. Different rollouts may run in different threads.

    Each method may also be a coroutine function. An environment may have a method ``close`` without
    arguments, which is called when the rollout ends, also after an error.
    """

    def reset(self, prompt: Prompt) -> Observation | Awaitable[Observation | None] | None:
        """Start a rollout with this prompt.

        Returns:
            An observation whose tokens are appended to the prompt, or None for none. It has no
            reward and does not end the rollout.
        """
        ...

    def step(self, tokens: Sequence[int]) -> Observation | Awaitable[Observation]:
        """Respond to one completion.

        Args:
            tokens: Tokens of the completion, including its stop text.

        Raises:
            BrokenEnvironmentError: If the environment failed; the run stops with the message.
        """
        ...


class SampleFunction(Protocol):
    """Samples one completion of an agent's rollout."""

    async def __call__(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        is_repeated: bool = False,
    ) -> Completion:
        """Return a completion of these tokens.

        If an equal call was cancelled, its completion is returned.

        Args:
            tokens: Everything that the policy reads.
            max_tokens: Maximum length of the completion, if it is below that of the run.
            stop: Texts that end the completion, in addition to those of the run.
            is_repeated: Return the completion of an equal earlier call, if there is one.

        Raises:
            RolloutLimitError: If the rollout may have no further completion, or none so long. What
                the agent raises afterwards is not counted as a failure.
            InvalidAnswerError: If `tokens` is empty, or a token id does not exist.
            RefusedRequestError: If the sampler cannot complete the request. It may complete
                others.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """The end of an agent's rollout."""

    reward: float = 0.0
    """Added to the rollout's score."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts of the rollout, summed over all rollouts of an RL step."""


@runtime_checkable
class AgentEnvironment(Protocol):
    """The environment of one rollout that requests completions itself.

    It decides what the policy reads. Completions that follow each other token by token become one
    sample. If it changes what the policy has read before, another sample begins.
    """

    async def run_agent(self, prompt: Prompt, *, sample: SampleFunction) -> AgentOutcome:
        """Run the rollout of a prompt to its end; several completions may be requested at a time.

        Raises:
            Exception: Any error fails the rollout, like those of an `Environment`.
        """
        ...


def check_answer(
    answer: object, *, kind: type[Observation] | type[AgentOutcome], vocab_size: int | None
) -> None:
    """Check what an environment has returned.

    Args:
        answer: What it has returned.
        kind: What it should return.
        vocab_size: Number of token ids; None if it is not known.

    Raises:
        InvalidAnswerError: If it is something else, its reward is not finite, a token id does not
            exist, or a metric is not a number.
    """
    if not isinstance(answer, kind):
        raise InvalidAnswerError(
            f"the environment returned {answer!r:.100}: return an {kind.__name__}."
        )
    tokens = answer.tokens if isinstance(answer, Observation) else ()
    try:
        is_finite = math.isfinite(answer.reward)
        ids = [operator.index(token) for token in tokens]
        for count in dict(answer.metrics).values():
            math.isfinite(count)  # raises if it is no number
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidAnswerError(
            f"the environment returned {answer!r:.100}: return integers as tokens, a number as "
            "reward, and a dictionary of numbers as metrics."
        ) from error
    lowest, highest = min(ids, default=0), max(ids, default=0)
    has_invalid_token = lowest < 0 or (vocab_size is not None and highest >= vocab_size)
    if not is_finite:
        raise InvalidAnswerError(
            f"the environment returned reward {answer.reward}: return a finite number."
        )
    if has_invalid_token:
        raise InvalidAnswerError(
            f"the environment returned token {lowest if lowest < 0 else highest}: return "
            f"{describe_token_ids(vocab_size)}."
        )


def describe_token_ids(vocab_size: int | None) -> str:
    """Name the ids that an environment may use, for a message that refuses another one."""
    limits = "" if vocab_size is None else f", 0 to {vocab_size - 1}"
    return f"ids of the run's tokenizer{limits}"


EnvironmentFactory = Callable[[], Environment | AgentEnvironment]
"""Creates the environment of one rollout.

A factory may have a coroutine method ``close``, which ends processes that its environments share.
"""
