"""What a trainer asks of an engine's head, and how it turns the answers into a loss per token or per sequence.

An objective returns losses and weights, never a mean: ``reduction`` makes the one scalar, with denominators that were fixed where the
batch was planned. So its gradient does not depend on how the mini-batch is split, and no objective needs a collective.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Literal, TypeVar

from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError, EngineStateError
from temper_engine_api.metrics import Metric

LOGPROB_AT_IDS = "logprob_at_ids"
"""Name of the [T, K] int64 column that ``HeadOutput.LOGPROB_AT`` reads its token ids from."""


class HeadOutput(StrEnum):
    """What a head can be asked. Answers are float32 whatever the compute dtype, in the layout of the batch's columns."""

    LOGPROB = "logprob"
    """[T] log-probability of each token, after temperature."""
    ENTROPY = "entropy"
    """[T] entropy of the distribution each token was drawn from, after temperature."""
    LOGPROB_AT = "logprob_at"
    """[T, K] log-probabilities of the ids in the column LOGPROB_AT_IDS."""
    LOGSUMEXP_TERMS = "logsumexp_terms"
    """[T] log of the normaliser of the logits, after temperature."""
    VALUE = "value"
    """[T] value of the state before each token."""
    SCORE = "score"
    """[B] score of each sequence, read at its last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutputs:
    """A head's answers for one micro-batch; whole sequences, also under sequence and context parallel.

    Positions that nobody asked for (the first of a sequence; untrained ones during training) hold 0 and carry no gradient.
    """

    columns: Mapping[HeadOutput, Tensor]
    """[T], [T, K] or [B] float32 by query."""

    def __getitem__(self, head_output: HeadOutput) -> Tensor:
        """The answer to a query.

        Raises:
            EngineStateError: it was not asked.
        """
        if head_output not in self.columns:
            raise EngineStateError(
                f"the head was not asked for {head_output.value!r}: name it in the objective's required_outputs, or in outputs."
            )
        return self.columns[head_output]

    def detach(self) -> "HeadOutputs":
        """The same numbers without their graph."""
        return HeadOutputs(
            columns={head_output: column.detach() for head_output, column in self.columns.items()}
        )


class AggregationMode(StrEnum):
    """How per-token losses become one number. Sums run over trained tokens of the whole mini-batch, all ranks."""

    TOKEN_MEAN = "token_mean"
    """sum of tokens / trained tokens (DAPO, SFT)."""
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"
    """mean over sequences of each one's token mean (GRPO as published)."""
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"
    """mean over sequences of each one's token sum."""
    SEQUENCE_MEAN_TOKEN_SUM_NORM = "sequence_mean_token_sum_norm"
    """mean over sequences of each one's token sum / a fixed horizon (Dr. GRPO)."""
    GROUP_MEAN = "group_mean"
    """sum over sequences / groups; per-sequence losses only (one loss a preference pair)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """A mode and, where it needs one, its horizon."""

    mode: AggregationMode = AggregationMode.TOKEN_MEAN
    """See AggregationMode."""
    horizon: int | None = None
    """Tokens; only for SEQUENCE_MEAN_TOKEN_SUM_NORM, where it has no default."""

    def __post_init__(self) -> None:
        wants = self.mode == AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM
        if wants and (self.horizon is None or self.horizon < 1):
            raise ConfigError(
                f"aggregation {self.mode.value} divides by a fixed horizon: set horizon to the longest completion in tokens."
            )
        if not wants and self.horizon is not None:
            raise ConfigError(
                f"horizon has no effect with aggregation {self.mode.value}: remove it, or use sequence_mean_token_sum_norm."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What an objective returns for one micro-batch: not reduced."""

    loss: Tensor
    """[T] or [B] float32 with gradient; entries outside the loss mask are ignored, whatever they hold."""
    weight: Tensor | None = None
    """[T] or [B] float32 without gradient, like loss; None is all ones. Denominators never depend on it."""
    level: Literal["token", "sequence"] = "token"
    """Whether loss is [T] or [B]."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Detached numbers for the log."""


class Objective(ABC):
    """A frozen dataclass that is registered by name; its fields are its coefficients."""

    name: ClassVar[str]
    aggregation: Aggregation
    """How its terms are reduced; a field of every subclass."""

    @property
    @abstractmethod
    def required_outputs(self) -> frozenset[HeadOutput]:
        """What the head is asked with gradient."""

    @property
    def columns(self) -> frozenset[str]:
        """Names of the per-token and per-sequence columns it reads; checked before the first forward."""
        return frozenset()

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Per-token columns [T] computed once from the whole mini-batch over all ranks, for batch statistics; by default none.

        Random choices may depend on (seed, sample id, position) only, never on the order of the samples.
        """
        return {}

    @abstractmethod
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Losses and weights of one micro-batch of whole sequences."""


ObjectiveT = TypeVar("ObjectiveT", bound=type[Objective])

_REGISTRY: dict[str, type[Objective]] = {}


def register_objective(name: str) -> Callable[[ObjectiveT], ObjectiveT]:
    """Class decorator: find this objective by name; the invariance laws then cover it.

    Raises:
        ConfigError: another class has that name.
    """

    def add(cls: ObjectiveT) -> ObjectiveT:
        known = _REGISTRY.setdefault(name, cls)
        if known is not cls and known.__qualname__ != cls.__qualname__:
            raise ConfigError(
                f"objective name {name!r} is taken by {known.__module__}.{known.__qualname__}: choose another."
            )
        cls.name = name
        return cls

    return add


def get_objective_class(name: str) -> type[Objective]:
    """The registered class of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _REGISTRY:
        raise ConfigError(
            f"no objective is called {name!r}; registered are {', '.join(sorted(_REGISTRY)) or 'none'}."
        )
    return _REGISTRY[name]


def list_objectives() -> Mapping[str, type[Objective]]:
    """Every registered objective by name."""
    return MappingProxyType(_REGISTRY)
