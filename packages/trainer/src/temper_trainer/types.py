"""The data of an RL step: what the rooms hand to each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from temper_trainer.config.rollout import SamplingConfig

if TYPE_CHECKING:
    # Reward workers import this file: without torch they start in a tenth of the time.
    from torch import Tensor

IS_CHOSEN = "is_chosen"
"""Name of the [B] bool column that says whether a sample is the preferred one of its pair."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    END_TOKEN = "end_token"
    """The model said so."""
    STOP_TEXT = "stop_text"
    """One of sampling.stop appeared."""
    MAX_TOKENS = "max_tokens"
    """It was cut."""
    INTERRUPTED = "interrupted"
    """New weights came; it goes on under them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question, ready to be completed."""

    prompt_id: int
    """Row in its source; the same in every epoch."""
    text: str
    """As it was tokenised."""
    tokens: tuple[int, ...]
    """Token ids, at least one."""
    answer: str
    """Reference answer as it stands in the source."""
    source: str = ""
    """Which source it came from."""
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Fields of the row that the source's extra_keys name, for reward functions."""
    route: str = ""
    """Value of the routing key, by which a teacher is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """One completion to make."""

    request_id: int
    """Unique within one call of the sampler."""
    prompt_tokens: tuple[int, ...]
    """What is completed."""
    sampling: SamplingConfig
    """How."""
    seed: int
    """The tokens drawn depend on it and on the weights, not on what else is being decoded (up to kernel rounding)."""
    session: int | None = None
    """Requests that share one go to the same replica, which remembers their beginning; None is the prompt's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Tokens that one call of the sampler returned."""

    request_id: int
    """Of its request."""
    tokens: tuple[int, ...]
    """Token ids, the end token included where there is one; at least one, unless it was interrupted."""
    rollout_logprobs: tuple[float, ...]
    """Log-prob of each token under the sampler's own distribution after temperature, before top-p and top-k."""
    finish_reason: FinishReason
    """Why it ended."""
    weight_version: int
    """Of the weights that made it; of the oldest ones where several did."""
    token_versions: tuple[int, ...] = ()
    """Of each token's weights, where weights came in the middle; empty where one version made all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward, or why there is none: a failing reward is counted, never a silent zero."""

    reward: float | None
    """Finite; None when scoring failed."""
    failure: str | None = None
    """``raised``, ``timeout`` or ``not_finite`` with the message; None when there is a reward."""
    components: tuple[float, ...] = ()
    """The rewards that it is the weighted sum of, where there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One more completion of a rollout, and what the environment said before it."""

    observation: tuple[int, ...]
    """Token ids of the environment's answer, as they stand between the two completions; never trained."""
    completion: Completion
    """What the policy said then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A prompt with one or more completions and their reward."""

    prompt: Prompt
    """The question."""
    completion: Completion
    """The first, and mostly the only, answer."""
    text: str
    """What was scored, decoded without special tokens."""
    reward: float
    """What is trained on: the score, after shaping."""
    group_id: int
    """Completions of one prompt in one step share it."""
    sample_id: int
    """Unique in its step."""
    turns: tuple[Turn, ...] = ()
    """What followed the first completion, where there is an environment."""
    components: tuple[float, ...] = ()
    """The rewards that the score is the weighted sum of, where there are several."""
    baseline: float | None = None
    """Reward of the prompt's greedy completion, shaped like its own; only for remax."""
    baseline_tokens: int = 0
    """Length of that completion."""

    @property
    def completions(self) -> tuple[Completion, ...]:
        """All of them, in order."""
        return (self.completion, *(turn.completion for turn in self.turns))

    @property
    def num_tokens(self) -> int:
        """After the prompt, what the environment said included."""
        return len(self.completion.tokens) + sum(
            len(turn.observation) + len(turn.completion.tokens) for turn in self.turns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and a completion to imitate."""

    prompt: Prompt
    """The question."""
    tokens: tuple[int, ...]
    """The completion's token ids, the end token included."""
    loss_mask: tuple[bool, ...] | None = None
    """Which of ``tokens`` are trained, where a conversation goes on after them; None is all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One preference in tokens."""

    chosen: Demonstration
    """The preferred completion."""
    rejected: Demonstration
    """The other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCursor:
    """Where in the data a run stands; with (run.seed, source) it determines everything that follows."""

    epoch: int = 0
    """Completed passes."""
    index: int = 0
    """Prompts of this pass that were already handed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """What an advantage estimator returns, in the layout of the step's samples."""

    advantages: "Tensor"
    """[T] float32; 0 at untrained tokens."""
    returns: "Tensor | None" = None
    """[T] float32 targets of the value model; only from gae."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers for the log."""
