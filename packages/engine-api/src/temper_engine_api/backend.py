"""What the author of an engine fills in: one abstract method for each thing that only a backend knows how to do."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import ClassVar, Literal, TypeVar

from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.errors import ConfigError, EngineStateError
from temper_engine_api.hooks import LossFn
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import HeadOutput, HeadOutputs, Objective
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology
from temper_engine_api.weights import NamedWeight, TrainingState

MicroBatchLoss = Callable[[HeadOutputs, SequenceBatch], Tensor]
"""The scalar of one micro-batch, to be differentiated as it is; parts add up over micro-batches and data-parallel ranks."""


ObjectT = TypeVar("ObjectT")


class EngineBackend(ABC):
    """The lower half of an engine; derive from ``engine.BaseEngine``, which adds the contract."""

    config_class: ClassVar[type[EngineConfig]]
    """The frozen dataclass that configures this engine."""
    capabilities: ClassVar[frozenset[Capability]]
    """What it claims; see Capability."""

    def __init__(self, config: EngineConfig) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigError(
                f"{type(self).__name__} takes a {self.config_class.__name__}, not a {type(config).__name__}."
            )
        self.config = config
        self._topology: Topology | None = None
        self._objective: Objective | None = None
        self._loss_fn: LossFn | None = None
        self._loss_fn_outputs: frozenset[HeadOutput] = frozenset()
        self._mode: Literal["train", "eval"] | None = None
        self._is_adapter_disabled = False

    @abstractmethod
    def _build(self) -> Topology:
        """Build or load model, head, optimiser; join the process group or make one."""

    @abstractmethod
    def _run_micro_batches(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
        reduce_gradients: bool,
    ) -> list[HeadOutputs] | None:
        """Run the micro-batches of a plan through the model, and back where ``forward_only`` is False.

        Args:
            batch: this rank's share, on any device.
            queries: what the head is asked. With ``micro_batch_loss`` and not ``forward_only``, only trained positions need an answer;
                otherwise every position that has a predecessor.
            micro_batch_loss: None, or the scalar to differentiate (or, with ``forward_only``, to evaluate) for each micro-batch.
            forward_only: no gradients, no dropout, no graph kept.
            reduce_gradients: reduce across ranks together with the last micro-batch; otherwise gradients stay local and add up.

        Returns:
            Detached answers per micro-batch where this rank has them, else None; of the ranks that have the same ones, the base class
            lets those out that ``topology.returns_outputs`` names.
        """

    def _collect_metrics(self) -> Mapping[str, Metric]:
        """What an engine has to say about itself after a call, such as ``memory/allocated_gib``; logged beside the objective's metrics.

        A mapping that waits for a device when it is read, and not before, keeps the host ahead of it.
        """
        return {}

    @abstractmethod
    def _reduce_pending_gradients(self) -> None:
        """Reduce local gradients across ranks by sum."""

    @abstractmethod
    def _apply_gradients(self, *, lr: float) -> float:
        """Global gradient norm in float32 before clipping; clips and updates only if it is finite (the same on every rank).

        Of an engine that claims FP16, losses were multiplied with ``loss_scale.value`` before their backward pass, and gradients are
        divided by it here, before the norm.
        """

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Drop gradients."""

    @abstractmethod
    def _loaded(self, mode: Literal["train", "eval", "update"]) -> AbstractContextManager[None]:
        """Bring in what a mode needs and put it back on exit, also when the body raises. Nested entries cost nothing."""

    @abstractmethod
    def _iterate_weights(self) -> Iterator[NamedWeight]:
        """Full tensors, float32 or the dtype of the compute, in one order on every rank. Collective."""

    @abstractmethod
    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Strict both ways; checks names and shapes before the first weight changes where the stream's manifest allows it."""

    @abstractmethod
    def _iterate_state(self) -> Iterator[TrainingState]:
        """The portable training state. Collective."""

    @abstractmethod
    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        """Load the portable training state, strict both ways. Collective."""

    @abstractmethod
    def _write_state(self, directory: str) -> list[str]:
        """Write parameters, optimiser and RNG states; return relative paths of the files this rank wrote. Collective."""

    def _stage_state(self) -> Callable[[str], list[str]]:
        """Of engines that claim BACKGROUND_SAVE: copy what ``_write_state`` would write, and return what writes the copy. Collective.

        The function does what ``_write_state`` does, on another thread and while the engine trains on: it neither touches the engine
        nor runs collectives in a group that the engine uses.
        """
        raise NotImplementedError

    def _gather_in_background(self, item: ObjectT) -> list[ObjectT]:
        """Of engines that claim BACKGROUND_SAVE: as ``_gather_objects``, among the threads that save."""
        raise NotImplementedError

    @abstractmethod
    def _read_state(self, directory: str) -> None:
        """Read what ``_write_state`` wrote, at this or another layout. Collective."""

    @abstractmethod
    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        """Sum over data-parallel ranks, and the same on every rank of a replica, also where the loss lives on the last stage."""

    @abstractmethod
    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        """Small picklable objects of every rank in rank order, on every rank."""

    @abstractmethod
    def to(
        self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True
    ) -> None:
        """Move parameters and gradients, or optimiser states, by hand."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and the process groups this engine made; a second engine may follow in the same process."""

    def _disable_adapter(self) -> AbstractContextManager[None]:
        """The base model alone inside; of engines that claim ADAPTER. Nested entries are harmless."""
        raise NotImplementedError

    def _export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """The configuration as JSON holds it, and full float32 tensors by PEFT name; of engines that claim ADAPTER. Collective."""
        raise NotImplementedError

    def _load_adapter(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapter, strict both ways; of engines that claim ADAPTER. Collective."""
        raise NotImplementedError

    @property
    def topology(self) -> Topology:
        """Sizes and ranks.

        Raises:
            EngineStateError: before ``init_model``.
        """
        if self._topology is None:
            raise EngineStateError("the topology is known only after init_model().")
        return self._topology

    @property
    def model_type(self) -> str:
        """language_model, value_model or reward_model."""
        return self.config.model.model_type

    @property
    def objective(self) -> Objective | None:
        """What ``set_loss_fn`` was given, when it was an Objective."""
        return self._objective
