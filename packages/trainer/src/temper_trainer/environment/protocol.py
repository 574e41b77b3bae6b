"""The interface of an environment: one object for each rollout, from its first token to its last."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from temper_engine_api.errors import TemperError
from temper_trainer.types import Prompt


class BrokenEnvironmentError(TemperError, RuntimeError):
    """An environment broke in a way that is not the policy's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment answers to one completion."""

    tokens: tuple[int, ...] = ()
    """Token ids that follow the completion; never trained. May be empty."""
    is_done: bool = False
    """Whether the rollout ends here; then ``tokens`` are not appended."""
    reward: float = 0.0
    """Added to the rollout's score."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts of this step, added up over the round's rollouts."""


class Environment(Protocol):
    """One rollout's world. Steps of different rollouts may run in different threads."""

    def reset(self, prompt: Prompt) -> None:
        """Begin with this prompt, before the first completion."""
        ...

    def step(self, tokens: Sequence[int]) -> Observation:
        """Answer the tokens of one completion, its stop text included.

        Raises:
            BrokenEnvironmentError: the environment broke; the run stops and says so.
        """
        ...


EnvironmentFactory = Callable[[], Environment]
"""Makes the environment of one rollout."""
