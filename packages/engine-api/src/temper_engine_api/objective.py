"""Objectives: per-token or per-sequence losses from the outputs of the model's head.

An objective returns losses and weights, not a mean. `reduction.reduce_loss` makes the scalar, with
denominators that were counted when the mini-batch was planned. So the gradient does not depend on
the split into ranks and micro-batches, and an objective needs no collective.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from types import MappingProxyType
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.distributed.gatherable import gatherable
from temper_engine_api.errors import BatchError, ConfigError, EngineStateError
from temper_engine_api.metrics import Metric

LOGPROB_AT_IDS = "logprob_at_ids"
"""Name of the [T, K] int64 column with the token ids for `HeadOutput.LOGPROB_AT`."""

ROUTED_EXPERTS = "routed_experts"
"""Name of the [T, layers, K] int16 column with the experts that process each token.

Layers are those with experts, in order. An engine with `Capability.ROUTING_REPLAY` sends the tokens
to these experts, in training and in forward-only calls; -1 for all K leaves the choice to the
router. The K experts of a token differ. Gate weights are computed from the router's logits as
usual, and are differentiable. A sampler records choices when a token is the input, so a sequence's
last token has none.
"""


@gatherable
class HeadOutput(StrEnum):
    """Quantity that a model computes for a batch, most of them in its head.

    Values are float32 for every compute dtype, and aligned with the batch columns.

    Example:
        >>> HeadOutput("logprob") is HeadOutput.LOGPROB
        True
    """

    LOGPROB = "logprob"
    """[T] log-probability per token, from logits divided by the temperature."""
    ENTROPY = "entropy"
    """[T] entropy of the distribution that predicts each token, after temperature."""
    LOGPROB_AT = "logprob_at"
    """[T, K] log-probabilities of the token ids in the column `LOGPROB_AT_IDS`."""
    LOGSUMEXP = "logsumexp"
    """[T] logsumexp of the logits, after temperature."""
    VALUE = "value"
    """[T] value of the state before each token."""
    SCORE = "score"
    """[B] score per sequence, read at its last token."""
    ROUTED_EXPERTS = "routed_experts"
    """[T, layers, K] experts that processed each token, also the first and untrained ones, in any
    order; as the column of this name, but float32. In forward-only calls of engines with
    `Capability.ROUTING_REPLAY`."""


def get_logprob_at_ids(batch: SequenceBatch) -> Tensor:
    """Return the [T, K] token ids that `HeadOutput.LOGPROB_AT` needs.

    Raises:
        BatchError: If the batch has no such column.
    """
    if LOGPROB_AT_IDS not in batch.columns:
        raise BatchError(
            f"logprob_at was requested, but the batch has no column {LOGPROB_AT_IDS!r}: add [T, K] "
            "token ids."
        )
    return batch.columns[LOGPROB_AT_IDS]


def check_routed_experts(batch: SequenceBatch, *, num_layers: int, num_experts: int) -> None:
    """Check that routers could have made the choices in the column `ROUTED_EXPERTS`.

    Waits once for the device of the batch. Dummies may have any experts.

    Args:
        batch: A batch with this column.
        num_layers: Number of layers of the model that have experts.
        num_experts: Number of experts in each of them.

    Raises:
        BatchError: If the column has another number of layers, an expert that does not exist, a
            token that goes to one expert twice, or -1 for some of a token's K experts only.
    """
    choices = batch.columns[ROUTED_EXPERTS]
    if choices.ndim != 3 or choices.shape[1] != num_layers:
        raise BatchError(
            f"column {ROUTED_EXPERTS!r} has shape {tuple(choices.shape)}, but must be [tokens, "
            f"layers, experts per token] with the {num_layers} layers of the model that have "
            "experts: record the choices with the same model."
        )
    if not choices.numel():
        return
    # Contiguous, because each is compared with all others.
    columns = [each.contiguous() for each in choices.unbind(-1)]
    is_open = columns[0] < 0
    is_wrong = torch.zeros_like(is_open)
    for each in columns:
        is_wrong |= (each < -1) | (each >= num_experts) | ((each < 0) != is_open)
    for one, other in combinations(columns, 2):
        is_wrong |= (one == other) & ~is_open
    is_wrong &= ~batch.is_dummy[batch.sequence_index][:, None]
    if is_wrong.any():
        raise BatchError(
            f"column {ROUTED_EXPERTS!r} sends a token to experts {choices[is_wrong][0].tolist()}, "
            f"but the model has 0 to {num_experts - 1}, the experts of a token differ, and only -1 "
            "for all of them leaves the choice to the router: record the choices with the same "
            "model."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutputs:
    """Outputs of the model's head for one micro-batch.

    They cover complete sequences, also under sequence and context parallelism. The first position
    of a sequence, and untrained positions during training, are 0 and have no gradient.

    Example:
        >>> import torch
        >>> outputs = HeadOutputs(columns={HeadOutput.LOGPROB: torch.tensor([0.0, -1.5, -0.2])})
        >>> outputs[HeadOutput.LOGPROB].tolist()
        [0.0, -1.5, -0.20000000298023224]
    """

    columns: Mapping[HeadOutput, Tensor]
    """[T], [T, K], [T, layers, K] or [B] float32."""

    def __getitem__(self, head_output: HeadOutput) -> Tensor:
        """Return one output.

        Raises:
            EngineStateError: If this output was not requested from the head.
        """
        if head_output not in self.columns:
            raise EngineStateError(
                f"output {head_output.value!r} was not requested from the head: add it to the "
                "objective's required_outputs, or to outputs."
            )
        return self.columns[head_output]

    def connect(self, loss: Tensor) -> Tensor:
        """Return the loss; if it has no gradient, add one of 0 with respect to the outputs.

        An objective may ignore its outputs, but engines differentiate every loss, and ranks that
        skipped the backward pass would miss its collectives.
        """
        if loss.requires_grad:
            return loss
        empty = [column[:0].sum() for column in self.columns.values() if column.requires_grad]
        return sum(empty, start=loss)

    def detach(self) -> "HeadOutputs":
        """Return the same values detached from the graph."""
        return HeadOutputs(
            columns={head_output: column.detach() for head_output, column in self.columns.items()}
        )


MicroBatchLoss = Callable[[HeadOutputs, SequenceBatch], Tensor]
"""Computes the scalar of one micro-batch to differentiate. Engines must not rescale it: values from
all micro-batches on all data-parallel ranks add up to the loss."""


class AggregationMode(StrEnum):
    """Reduction of losses to one scalar; sums are over the full mini-batch on all ranks."""

    TOKEN_MEAN = "token_mean"
    """Sum over trained tokens / number of trained tokens (DAPO, SFT)."""
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"
    """Mean over sequences of the mean over trained tokens (GRPO as published)."""
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"
    """Mean over sequences of the sum over trained tokens."""
    SEQUENCE_MEAN_TOKEN_SUM_NORM = "sequence_mean_token_sum_norm"
    """Mean over sequences of (sum over trained tokens / a fixed horizon) (Dr. GRPO)."""
    TOKEN_SUM = "token_sum"
    """Sum over trained tokens, without a denominator."""
    GROUP_MEAN = "group_mean"
    """Sum over sequences / number of groups; for per-sequence losses, such as preference pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """Aggregation mode and its horizon.

    Example:
        >>> Aggregation().mode.value
        'token_mean'
        >>> Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM, horizon=1024).horizon
        1024
    """

    mode: AggregationMode = AggregationMode.TOKEN_MEAN
    horizon: int | None = None
    """Divisor in tokens; required by SEQUENCE_MEAN_TOKEN_SUM_NORM and refused by other modes."""

    def __post_init__(self) -> None:
        needs_horizon = self.mode == AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM
        if needs_horizon and (self.horizon is None or self.horizon < 1):
            raise ConfigError(
                f"aggregation {self.mode.value} divides by a fixed horizon, which is "
                f"{self.horizon}: set horizon to the longest completion in tokens."
            )
        if not needs_horizon and self.horizon is not None:
            raise ConfigError(
                f"horizon has no effect with aggregation {self.mode.value}: remove it, or use "
                "sequence_mean_token_sum_norm."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Unreduced losses of one micro-batch, as an objective returns them.

    Example:
        >>> import torch
        >>> logprobs = torch.tensor([0.0, -1.5, -0.25], requires_grad=True)
        >>> advantages = torch.tensor([0.0, 1.0, 1.0])
        >>> LossTerms(loss=-advantages * logprobs).loss[1:].tolist()
        [1.5, 0.25]
    """

    loss: Tensor
    """[T] or [B] float32 with gradient; entries outside the loss mask are ignored, even if NaN."""
    weight: Tensor | None = None
    """Float32 factors in the shape of `loss`, without gradient; None is all ones. They do not
    change the denominators."""
    level: Literal["token", "sequence"] = "token"
    """'token' if `loss` is [T], 'sequence' if it is [B]."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Detached metrics to log."""


class Objective(ABC):
    """Base class of objectives.

    A subclass is a frozen dataclass with the coefficients as fields, registered by name with
    `register_objective`.

    Example:
        >>> import torch
        >>> from temper_engine_api.batch import from_sequences
        >>> @dataclass(frozen=True, kw_only=True)
        ... class WeightedLikelihood(Objective):
        ...     aggregation: Aggregation = Aggregation()
        ...     weight: float = 1.0
        ...
        ...     @property
        ...     def required_outputs(self):
        ...         return frozenset({HeadOutput.LOGPROB})
        ...
        ...     def __call__(self, head_outputs, batch):
        ...         return LossTerms(loss=-self.weight * head_outputs[HeadOutput.LOGPROB])
        >>> batch = from_sequences([torch.arange(3)], loss_masks=[torch.arange(3) > 0])
        >>> outputs = HeadOutputs(columns={HeadOutput.LOGPROB: torch.tensor([0.0, -1.5, -0.25])})
        >>> WeightedLikelihood(weight=2.0)(outputs, batch).loss[1:].tolist()
        [3.0, 0.5]
    """

    name: ClassVar[str]
    aggregation: Aggregation
    """Reduction of the terms; a field of every subclass."""

    @property
    @abstractmethod
    def required_outputs(self) -> frozenset[HeadOutput]:
        """Outputs that the head must compute with gradient."""

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns that the objective reads; checked before the first forward pass."""
        return frozenset()

    def prepare(self, batch: SequenceBatch, *, seed: int) -> Mapping[str, Tensor]:
        """Compute per-token columns [T] from the mini-batch across all ranks; empty by default.

        Use it for batch statistics, which a micro-batch does not have. Random choices may depend
        on (seed, sample id, position) only: the order of the samples differs between plans.
        """
        return {}

    @abstractmethod
    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        """Compute losses and weights for one micro-batch of complete sequences."""


ObjectiveT = TypeVar("ObjectiveT", bound=type[Objective])

_REGISTRY: dict[str, type[Objective]] = {}


def register_objective(name: str) -> Callable[[ObjectiveT], ObjectiveT]:
    """Register an objective class under a name, as a decorator.

    The conformance tests on split invariance then cover it too.

    Raises:
        ConfigError: If another class has that name.
    """

    def add(cls: ObjectiveT) -> ObjectiveT:
        known = _REGISTRY.setdefault(name, cls)
        if known is not cls and known.__qualname__ != cls.__qualname__:
            raise ConfigError(
                f"objective name {name!r} is already used by "
                f"{known.__module__}.{known.__qualname__}: choose another."
            )
        cls.name = name
        return cls

    return add


def get_objective_class(name: str) -> type[Objective]:
    """Return the objective class registered under a name.

    Raises:
        ConfigError: If there is none.
    """
    if name not in _REGISTRY:
        raise ConfigError(
            f"no objective is registered as {name!r}; registered: "
            f"{', '.join(sorted(_REGISTRY)) or 'none'}. Import the module that registers it."
        )
    return _REGISTRY[name]


def list_objectives() -> Mapping[str, type[Objective]]:
    """Return all registered objective classes by name."""
    return MappingProxyType(_REGISTRY)
