"""Abstract methods that an engine implements.

Derive an engine from `engine.BaseEngine`, which implements the public contract with these methods.
"""

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
"""Computes the scalar of one micro-batch to differentiate. Engines must not rescale it: the values of
all micro-batches on all data-parallel ranks add up to the loss."""


ObjectT = TypeVar("ObjectT")


class EngineBackend(ABC):
    """Methods that each engine implements; derive from `engine.BaseEngine`, not from this class."""

    config_class: ClassVar[type[EngineConfig]]
    """Frozen dataclass with the engine's settings."""
    capabilities: ClassVar[frozenset[Capability]]
    """Capabilities that the engine claims."""

    def __init__(self, config: EngineConfig) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigError(
                f"{type(self).__name__} got a {type(config).__name__}, but needs a "
                f"{self.config_class.__name__}."
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
        """Build the model, head and optimizer, load weights, and join or create the process group."""

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
        """Run the forward pass, and the backward pass unless `forward_only`, of each micro-batch.

        Args:
            batch: This rank's micro-batches, on any device.
            requested_outputs: Outputs that the head must compute. In training only trained
                positions are needed, otherwise all positions with a predecessor.
            micro_batch_loss: Scalar to differentiate, or with `forward_only` to evaluate; None
                computes no loss.
            forward_only: Run without gradients and dropout.
            reduce_gradients: Reduce gradients over ranks after the last micro-batch; otherwise they
                stay local and accumulate.

        Returns:
            Detached outputs of each micro-batch, or None on ranks that do not have them. Ranks may
            return duplicates; the base class keeps those of ranks with `topology.returns_outputs`.
        """

    def _collect_metrics(self) -> Mapping[str, Metric]:
        """Return engine metrics of the last call, such as `memory/allocated_gib`; empty by default.

        Use `metrics.LazyMetrics` for values that block on the device, so that the host can run
        ahead until they are read.
        """
        return {}

    @abstractmethod
    def _reduce_pending_gradients(self) -> None:
        """Reduce accumulated local gradients over ranks by sum."""

    @abstractmethod
    def _apply_gradients(self, *, lr: float) -> float:
        """Clip gradients and update the parameters; return the global norm before clipping.

        The norm is computed in float32 and is the same on every rank. If it is not finite, change
        no parameter and no optimizer state. An engine that claims FP16 multiplies the loss by
        `loss_scale.value` before the backward pass and divides the gradients by it here, before
        the norm.
        """

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Set gradients to zero or None."""

    @abstractmethod
    def _loaded(self, mode: Literal["train", "eval", "update"]) -> AbstractContextManager[None]:
        """Load the offloaded state that a mode needs; offload it again on exit, also after an error.

        A nested entry must not copy anything.
        """

    @abstractmethod
    def _iterate_weights(self) -> Iterator[NamedWeight]:
        """Iterate over full tensors in float32 or the compute dtype, in the same order on all ranks.

        Collective.
        """

    @abstractmethod
    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        """Load full tensors; raise WeightError for missing and unexpected names and wrong shapes.

        Check names and shapes before the first weight changes if the stream allows it. Collective.
        """

    @abstractmethod
    def _iterate_state(self) -> Iterator[TrainingState]:
        """Iterate over the portable training state. Collective."""

    @abstractmethod
    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        """Load the portable training state; refuse missing and unexpected names. Collective."""

    @abstractmethod
    def _write_state(self, directory: str) -> list[str]:
        """Write parameters, optimizer states and RNG states. Collective.

        Returns:
            Paths of the files that this rank wrote, relative to the directory.
        """

    def _stage_state(self) -> Callable[[str], list[str]]:
        """Copy the state to host memory and return a function that writes the copy. Collective.

        The function behaves like `_write_state`, but runs on another thread while the engine
        trains: it must not touch the engine, nor run collectives in a process group that the
        engine uses. Required for BACKGROUND_SAVE.
        """
        raise NotImplementedError

    def _gather_in_background(self, item: ObjectT) -> list[ObjectT]:
        """Gather like `_gather_objects`, among the saving threads. Required for BACKGROUND_SAVE."""
        raise NotImplementedError

    @abstractmethod
    def _read_state(self, directory: str) -> None:
        """Read the files of `_write_state`, written with this or another layout. Collective."""

    @abstractmethod
    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        """Sum a value over data-parallel ranks; every rank gets the result.

        With pipeline parallelism only the last stage has the loss; the others get its value too.
        """

    @abstractmethod
    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        """Gather small picklable objects from all ranks to all ranks, in rank order."""

    @abstractmethod
    def to(
        self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True
    ) -> None:
        """Move parameters and gradients, or optimizer states, to the device or the host."""

    @abstractmethod
    def close(self) -> None:
        """Free memory and destroy the process groups that this engine created.

        Another engine may be built in the same process afterwards.
        """

    def _disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapter inside the context; may be nested. Required for ADAPTER."""
        raise NotImplementedError

    def _export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """Return the PEFT config and full float32 tensors by PEFT name. Required for ADAPTER."""
        raise NotImplementedError

    def _load_adapter(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Load adapter tensors; refuse missing and unexpected names. Required for ADAPTER."""
        raise NotImplementedError

    @property
    def topology(self) -> Topology:
        """Sizes and ranks of the parallel axes.

        Raises:
            EngineStateError: If `init_model` was not called.
        """
        if self._topology is None:
            raise EngineStateError("the engine has no topology yet: call init_model() first.")
        return self._topology

    @property
    def model_type(self) -> str:
        """'language_model', 'value_model' or 'reward_model'."""
        return self.config.model.model_type

    @property
    def objective(self) -> Objective | None:
        """Objective set with `set_loss_fn`; None if it is a plain function."""
        return self._objective
