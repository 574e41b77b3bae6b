"""The values that the packages of the trainer pass to each other in an RL step.

In order: `Prompt`, `SamplingRequest`, `Completion`, `Score`, `Rollout`. A batch of rollouts becomes
a `SequenceBatch`: see `temper_trainer.batching.samples`.
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from temper_engine_api.errors import ConfigError
from temper_trainer.config.rollout import SamplingConfig

if TYPE_CHECKING:
    # Reward workers import this file: without torch they start in a tenth of the time.
    from torch import Tensor

IS_CHOSEN = "is_chosen"
"""[B] bool sequence column: True for the preferred sample of a pair, or a desirable one."""
MARGIN = "margin"
"""[B] float32 sequence column: a pair's margin in the reward model loss, on both samples."""
LOSS_WEIGHTS = "loss_weights"
"""[T] float32 column: loss weight for a demonstration's token; 0 at untrained tokens."""
KL_BASELINE = "kl_baseline"
"""[B] float32 sequence column: estimate of KL(policy, reference) over the update, for KTO."""
TURNS_AFTER = "turns_after"
"""[T] float32 column: number of completions in the rollout after the token's own."""
TURN_REWARDS = "turn_rewards"
"""[T] float32 column: the environment's reward for a completion, at its last token; 0 elsewhere."""


class FinishReason(StrEnum):
    """Reason why a completion ended."""

    END_TOKEN = "end_token"
    """The model sampled an end token."""
    STOP_TEXT = "stop_text"
    """One of ``sampling.stop`` appeared in the text."""
    MAX_TOKENS = "max_tokens"
    """It reached ``sampling.max_tokens``."""
    INTERRUPTED = "interrupted"
    """Paused to publish new weights; it continues with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenized question.

    Example:
        >>> Prompt(prompt_id=3, text="6*7=", tokens=(6, 14, 7, 15), answer="42").tokens
        (6, 14, 7, 15)
    """

    prompt_id: int
    """Row in its source; the same in every epoch."""
    text: str
    """The text that was tokenized, after template or chat template."""
    tokens: tuple[int, ...]
    """Token ids; at least one."""
    answer: str
    """Reference answer, unchanged from the source."""
    difficulty: float | None = None
    """The row's difficulty, used to sort an epoch; None if its source has no
    ``difficulty_key``."""
    question: str = field(default="", compare=False)
    """The prompt of the row before templates, for judges; chat messages as text."""
    location: str = ""
    """Its row's file and line, or the data source's name, for messages."""
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Fields of the row listed in the source's ``extra_keys``, for reward functions."""
    teacher_tokens: tuple[int, ...] = ()
    """Token ids of the prompt for the policy when it is its own teacher; empty to use `tokens`."""
    given_completion: tuple[int, ...] = ()
    """Token ids of the row's own completion, including the end token, to train on instead of a
    sampled one; empty if there is none."""
    route: str = ""
    """Value of the routing key, which selects a teacher."""
    reward: str = ""
    """Name of its completions' reward; empty for reward.function or reward.components."""
    environment: str = ""
    """Name of its environment among ``environments``; empty for ``environment``."""
    source: str = ""
    """Key of its training source, such as `data.train`; set if there are several."""
    category: str = ""
    """Category of a held-out problem, if its source has categories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """A request for one completion.

    Example:
        Two completions of one prompt, which differ by their seeds:

        >>> sampling = SamplingConfig(max_tokens=8)
        >>> requests = [
        ...     SamplingRequest(
        ...         request_id=i, prompt_tokens=(5, 6), sampling=sampling, seed=40 + i
        ...     )
        ...     for i in range(2)
        ... ]
        >>> [request.seed for request in requests]
        [40, 41]
    """

    request_id: int
    """Unique within a sampler call."""
    prompt_tokens: tuple[int, ...]
    """Token ids before the completion. In later turns they include earlier turns."""
    sampling: SamplingConfig
    seed: int
    """Seed of the sampled tokens. The tokens depend on the seed and the weights, but not on
    requests in the same batch (up to rounding in kernels)."""
    session: int | None = None
    """Requests with the same session go to the same replica, to use its prefix cache. None derives
    it from the prompt."""


class RefusedRequestError(ConfigError):
    """A sampler cannot complete a request; it can complete others."""

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message, request_id)  # both, because a copy from a process is made of them
        self.request_id = request_id
        """Id of the request; None if the caller sent only one."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that the sampler returned for one request.

    Example:
        Two tokens and an end token, all sampled from weight version 3:

        >>> completion = Completion(
        ...     request_id=0,
        ...     tokens=(4, 2, 0),
        ...     rollout_logprobs=(-0.7, -0.1, -0.01),
        ...     finish_reason=FinishReason.END_TOKEN,
        ...     weight_version=3,
        ... )
        >>> len(completion.tokens) == len(completion.rollout_logprobs)
        True
    """

    request_id: int
    tokens: Sequence[int]
    """Token ids including the end token, if there is one; at least one, unless interrupted."""
    rollout_logprobs: Sequence[float]
    """float32 log-prob of each token under the sampler's distribution with temperature, before
    top-p and top-k."""
    finish_reason: FinishReason
    weight_version: int
    """Weight version that sampled it; the oldest if there are several."""
    is_given: bool = False
    """True for the row's own completion, which was not sampled."""
    token_versions: Sequence[int] = ()
    """Version of each token's weights, if they differ; otherwise empty."""
    # A tensor or None. A server's client evaluates this type, but torch is not imported here.
    routed_experts: Any = field(default=None, compare=False)
    """[tokens of prompt and completion - 1, layers, K] int16, the experts that the sampler chose
    for each token. The last token is missing, because the sampler never processed it. None unless
    ``rollout.routing_replay`` is sampler."""


def pack_tokens(tokens: Sequence[int]) -> "array[int]":
    """Return token ids or weight versions as an array with 4 bytes per token."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    # `struct` converts a tuple faster than `array` and numpy do.
    return array("I", struct.pack(f"{len(tokens)}I", *tokens))


def pack_logprobs(logprobs: Sequence[float]) -> "array[float]":
    """Return log-probs as an array with 4 bytes per token."""
    if isinstance(logprobs, array) and logprobs.typecode == "f":
        return logprobs
    return array("f", struct.pack(f"{len(logprobs)}f", *logprobs))


def pack_completion(completion: Completion) -> Completion:
    """Return a completion with arrays, which use less than 9 bytes per token instead of 80.

    This keeps memory low: a step may have a hundred million tokens.

    Example:
        >>> completion = Completion(
        ...     request_id=0,
        ...     tokens=(4, 2, 0),
        ...     rollout_logprobs=(-0.75, -0.5, -0.25),
        ...     finish_reason=FinishReason.END_TOKEN,
        ...     weight_version=3,
        ... )
        >>> packed = pack_completion(completion)
        >>> packed.tokens.itemsize, list(packed.tokens)
        (4, [4, 2, 0])
    """
    return replace(
        completion,
        tokens=pack_tokens(completion.tokens),
        rollout_logprobs=pack_logprobs(completion.rollout_logprobs),
        token_versions=completion.token_versions and pack_tokens(completion.token_versions),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward, or the reason for a failure. Failures are counted and never become a reward of 0.

    Example:
        >>> Score(reward=1.0).failure is None
        True
        >>> Score(reward=None, failure="timeout: no answer after 10 s").reward is None
        True
    """

    reward: float | None
    """Finite; None if scoring failed."""
    failure: str | None = None
    """``exception``, ``timeout`` or ``not_finite``, with a message; None if there is a reward."""
    components: tuple[float, ...] = ()
    """The components of a weighted sum, if the reward is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The environment's answer to a completion, and the next completion.

    Example:
        The environment answers a call of a calculator with the tokens 9 and 1:

        >>> turn = Turn(
        ...     observation=(9, 1),
        ...     completion=Completion(
        ...         request_id=0,
        ...         tokens=(4, 0),
        ...         rollout_logprobs=(-0.2, -0.01),
        ...         finish_reason=FinishReason.END_TOKEN,
        ...         weight_version=3,
        ...     ),
        ... )
        >>> len(turn.observation) + len(turn.completion.tokens)
        4
    """

    observation: tuple[int, ...]
    """Token ids of the environment's answer to the previous completion; never trained."""
    completion: Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Completions that an agent sampled after rewriting its history, for example to summarize it.

    Example:
        An agent that summarized its history continues from the summary (tokens 6, 2 and 8):

        >>> completion = Completion(
        ...     request_id=1,
        ...     tokens=(4, 0),
        ...     rollout_logprobs=(-0.2, -0.01),
        ...     finish_reason=FinishReason.END_TOKEN,
        ...     weight_version=3,
        ... )
        >>> branch = Branch(prompt_tokens=(6, 2, 8), completion=completion)
        >>> [each.tokens for each in branch.completions]
        [(4, 0)]
    """

    prompt_tokens: tuple[int, ...]
    """Token ids of the rewritten history, before the first completion; never trained."""
    completion: Completion
    """The first completion."""
    turns: tuple[Turn, ...] = ()
    """The following turns."""

    @property
    def completions(self) -> tuple[Completion, ...]:
        """All completions in order."""
        return (self.completion, *(turn.completion for turn in self.turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A prompt with its completions and their reward.

    Example:
        >>> completion = Completion(
        ...     request_id=0,
        ...     tokens=(4, 2, 0),
        ...     rollout_logprobs=(-0.7, -0.1, -0.01),
        ...     finish_reason=FinishReason.END_TOKEN,
        ...     weight_version=3,
        ... )
        >>> rollout = Rollout(
        ...     prompt=Prompt(prompt_id=3, text="6*7=", tokens=(6, 14, 7, 15), answer="42"),
        ...     completion=completion,
        ...     text="42",
        ...     reward=1.0,
        ...     group_id=0,
        ...     sample_id=0,
        ... )
        >>> rollout.num_tokens
        3
    """

    prompt: Prompt
    completion: Completion
    """The first completion; the only one without an environment."""
    text: str
    """The text that was scored, decoded without special tokens."""
    reward: float
    """The score, until ``reward.shaping`` replaces it by the shaped reward."""
    group_id: int
    """The same for all completions of a prompt in a step."""
    sample_id: int
    """Unique in a step."""
    turns: tuple[Turn, ...] = ()
    """The following turns, if there is an environment."""
    components: tuple[float, ...] = ()
    """The components of the score, if it is a weighted sum."""
    baseline: float | None = None
    """Reward of the prompt's greedy completion, shaped in the same way; only for ReMax."""
    baseline_tokens: int = 0
    """Number of tokens in that completion."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's reward for each completion, already included in `reward`; empty without an
    environment."""
    branches: tuple[Branch, ...] = ()
    """An agent's other histories, which become separate samples with the same advantage."""

    @property
    def is_truncated(self) -> bool:
        """True if a completion reached the token limit."""
        return any(each.finish_reason == FinishReason.MAX_TOKENS for each in self.completions)

    @property
    def completions(self) -> tuple[Completion, ...]:
        """All completions in order, branches last."""
        return (
            self.completion,
            *(turn.completion for turn in self.turns),
            *(completion for branch in self.branches for completion in branch.completions),
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens after the prompt without branches, with the environment's answers."""
        return len(self.completion.tokens) + sum(
            len(turn.observation) + len(turn.completion.tokens) for turn in self.turns
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and a completion to imitate.

    Example:
        Train only the completion's second and third token:

        >>> prompt = Prompt(prompt_id=0, text="Hi", tokens=(1, 2), answer="")
        >>> demonstration = Demonstration(
        ...     prompt=prompt, tokens=(3, 4, 0), loss_mask=(False, True, True)
        ... )
        >>> len(demonstration.tokens)
        3
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    """Token ids of the completion, including the end token."""
    loss_mask: tuple[bool, ...] | None = None
    """True at each of ``tokens`` to train, for example in the assistant's turns of a conversation;
    None trains all."""
    loss_weights: tuple[float, ...] | None = None
    """Loss weight per token, at least 0; 0 does not train the token. None uses 1 for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A preference between two completions.

    Example:
        >>> prompt = Prompt(prompt_id=0, text="2+2?", tokens=(5, 6), answer="")
        >>> pair = Pair(
        ...     chosen=Demonstration(prompt=prompt, tokens=(4, 0)),
        ...     rejected=Demonstration(prompt=prompt, tokens=(9, 9, 0)),
        ... )
        >>> [len(demonstration.tokens) for demonstration in pair.demonstrations]
        [2, 3]
    """

    chosen: Demonstration
    """The preferred completion."""
    rejected: Demonstration
    margin: float = 0.0
    """Margin between the two scores in the reward model loss."""

    @property
    def demonstrations(self) -> tuple[Demonstration, ...]:
        """Both completions with their prompt, the preferred one first."""
        return (self.chosen, self.rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabeledCompletion:
    """A single completion labeled as desirable or not, for KTO.

    Example:
        >>> prompt = Prompt(prompt_id=0, text="2+2?", tokens=(5, 6), answer="")
        >>> wrong = LabeledCompletion(
        ...     completion=Demonstration(prompt=prompt, tokens=(9, 0)), is_desirable=False
        ... )
        >>> wrong.completion.tokens
        (9, 0)
    """

    completion: Demonstration
    is_desirable: bool

    @property
    def demonstrations(self) -> tuple[Demonstration, ...]:
        """The completion with its prompt."""
        return (self.completion,)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCursor:
    """Position in the data. Together with run.seed and the source, determines all later prompts.

    Example:
        After 132 prompts of a source with 100 prompts:

        >>> epoch, index = divmod(132, 100)
        >>> DataCursor(epoch=epoch, index=index)
        DataCursor(epoch=1, index=32)
    """

    epoch: int = 0
    """Number of completed epochs."""
    index: int = 0
    """Number of prompts already used in this epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """An advantage estimator's result, in the layout of a step's samples.

    Example:
        Two completions for one prompt with rewards 1 and 0, each a prompt token and a trained
        token, with estimator dr_grpo:

        >>> import torch
        >>> from temper_engine_api.batch import from_sequences
        >>> from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
        >>> from temper_trainer.algorithms.advantages.estimators.group_estimators import DrGrpo
        >>> from temper_trainer.config.algorithm import AlgorithmConfig
        >>> samples = from_sequences(
        ...     [torch.tensor([5, 6]), torch.tensor([5, 7])],
        ...     loss_masks=[torch.tensor([False, True])] * 2,
        ...     group_ids=[0, 0],
        ... )
        >>> result = estimate_advantages(
        ...     AlgorithmConfig(advantage=DrGrpo()),
        ...     samples=samples,
        ...     rewards=torch.tensor([1.0, 0.0]),
        ... )
        >>> result.advantages.tolist()
        [0.0, 0.5, 0.0, -0.5]
        >>> result.returns is None
        True
    """

    advantages: "Tensor"
    """[T] float32; 0 at untrained tokens."""
    returns: "Tensor | None" = None
    """[T] float32 targets of the value model; only from estimators with a critic."""
    metrics: dict[str, float] = field(default_factory=dict)
