"""The workers of a role: a `TrainingWorker` per rank, and the driver's `WorkerGroup` of them all.

Arguments and results of a worker's methods can be serialized, because workers may run in other
processes.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from typing import TypeVar

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from temper_engine_api.batch import PackedBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint import PartReport
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import EngineStateError, TemperError
from temper_engine_api.metrics import Metric, merge_metrics
from temper_engine_api.objective import HeadOutput, Objective
from temper_engine_api.outputs import ForwardOutputs, StepResult, gather_outputs
from temper_engine_api.registry import load_engine_class
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology
from temper_engine_api.updates import UpdateReport
from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.config.run import LEGACY_TRAINING_WORKER, LEGACY_WORKER_GROUP
from temper_trainer.progress import track_wait

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """The result of one optimizer update on one rank.

    Example:
        >>> result = UpdateResult(
        ...     report=UpdateReport(grad_norm=0.8, outcome="stepped", sample_ids=()),
        ...     lr=1e-6,
        ...     elapsed_s=2.5,
        ... )
        >>> result.report.outcome
        'stepped'
    """

    report: UpdateReport
    """Gradient norm and outcome, the same on every rank."""
    lr: float
    """Learning rate for this update."""
    elapsed_s: float
    """Wall time of forward, backward and optimizer step."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of this rank."""


class TrainingWorker:
    """Runs an engine with its objective in one rank's process.

    A critic is a TrainingWorker whose engine has a value head; a reference policy has no optimizer.
    """

    def __init__(self, *, engine_name: str, config: EngineConfig, num_threads: int | None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        disable_progress_bar()  # of transformers, which each rank would show when it loads a model
        self._engine: BaseEngine = load_engine_class(engine_name)(config)
        self._advances_per_update = config.schedule.advance == "update"

    def init(self) -> Topology:
        """Build the model; collective."""
        self._engine.init_model()
        return self._engine.topology

    def set_objective(self, objective: Objective) -> None:
        """Set the objective that `update` minimizes."""
        self._engine.set_loss_fn(objective)

    def forward(
        self, part: PackedBatch, outputs: Collection[HeadOutput], without_adapter: bool = False
    ) -> StepResult:
        """Return outputs in input order, without gradients.

        Outputs are None on ranks that return none, such as earlier pipeline stages.
        """
        adapter_context = self._engine.disable_adapter() if without_adapter else nullcontext()
        with self._engine.eval_mode(), adapter_context:
            return self._engine.forward_backward_batch(part, forward_only=True, outputs=outputs)

    def evaluate(self, part: PackedBatch) -> StepResult:
        """Return the objective's loss and metrics without gradients."""
        with self._engine.eval_mode():
            return self._engine.forward_backward_batch(part, forward_only=True)

    def update(self, part: PackedBatch, is_last_of_step: bool) -> UpdateResult:
        """Run one optimizer update.

        Args:
            part: This rank's part of a mini-batch.
            is_last_of_step: True for the last update of an RL step. It advances a learning-rate
                schedule that counts RL steps instead of updates.
        """
        begin = time.perf_counter()
        # Read the rate now, because the schedule may advance below.
        engine, lr = self._engine, self._engine.current_lr
        engine.optimizer_zero_grad()
        with engine.train_mode():
            result = engine.forward_backward_batch(part, forward_only=False)
        engine.optimizer_step()
        assert engine.last_update is not None
        report = engine.last_update
        if self._advances_per_update or is_last_of_step:
            engine.lr_scheduler_step()
        return UpdateResult(
            report=report, lr=lr, elapsed_s=time.perf_counter() - begin, metrics=result.metrics
        )

    def release_cache(self) -> None:
        """Empty the CUDA cache, to free its memory for other processes on the GPU."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def export_weights(self) -> WeightStream:
        """Return a stream of full tensors under Hugging Face names; collective."""
        return self._engine.export_weights()

    def load_weights(self, weights: Iterable[NamedWeight]) -> None:
        """Load full tensors under Hugging Face names; collective."""
        self._engine.load_weights(weights)

    def export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """Return the contents of PEFT's two files, configuration and tensors; collective."""
        return self._engine.export_adapter()

    @property
    def is_first(self) -> bool:
        """True on rank 0 of the role."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """Rank in the role's process group."""
        return self._engine.topology.global_rank

    @cached_property
    def transport_state(self) -> dict[str, object]:
        """State that weight transports keep on this rank between two publishes."""
        return {}

    def write_part(self, directory: str) -> PartReport:
        """Write this rank's checkpoint files."""
        return self._engine.write_part(directory)

    def require(self, capability: Capability) -> None:
        """Raise CapabilityError if the engine does not have a capability."""
        self._engine.require(capability)

    def stage_part(self, directory: str) -> None:
        """Copy the state now and write it in the background.

        Call `finish_part` before staging the next part.
        """
        self._engine.stage_part(directory)

    def has_written_part(self) -> bool:
        """Return True if `finish_part` would not wait."""
        return self._engine.has_written_part

    def finish_part(self) -> PartReport:
        """Wait until the files of `stage_part` are written; return their sizes and checksums."""
        return self._engine.finish_part()

    def read_part(self, directory: str) -> None:
        """Restore this rank from a checkpoint."""
        self._engine.read_part(directory)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()


def make_worker(
    *, engine_name: str, config: EngineConfig, num_threads: int | None, is_deprecated: bool
) -> TrainingWorker:
    """Create one rank's worker.

    Args:
        engine_name: A value of `model_engine`.
        config: Configuration of that engine.
        num_threads: CPU threads of torch; None keeps torch's default.
        is_deprecated: Use the deprecated worker, which legacy-shim registers as an entry point.
    """
    # Use an entry point to not depend on the package of deprecated workers.
    kind: type[TrainingWorker] = TrainingWorker
    if is_deprecated:
        (point,) = entry_points(group=LEGACY_WORKER_GROUP, name=LEGACY_TRAINING_WORKER)
        kind = point.load()
    return kind(engine_name=engine_name, config=config, num_threads=num_threads)


def call_worker(worker: TrainingWorker, call: Callable[..., T], arguments: tuple[object, ...]) -> T:
    """Call a function with the worker as its first argument.

    Looks up methods of TrainingWorker by name, because a deprecated worker overrides them.
    """
    # Other functions, for example those of transports, are not methods: call them directly.
    if vars(TrainingWorker).get(call.__name__) is call:
        method: Callable[..., T] = getattr(worker, call.__name__)
        return method(*arguments)
    return call(worker, *arguments)


class WorkerError(TemperError, RuntimeError):
    """A worker died or did not answer in time."""


class FullStoreError(WorkerError):
    """Arguments or results do not fit into Ray's object store; the worker still runs."""


class WorkerGroup(ABC):
    """All ranks of one role. Implementations only differ in how `run` calls them."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.topologies: tuple[Topology, ...] = ()
        self.num_updates = 0
        """Number of started updates. While it is unchanged, the weights are unchanged."""
        self.is_broken = False
        """True if a rank has died or timed out. The role can't be used after that."""

    @abstractmethod
    def run(self, call: Callable[..., T], arguments: Sequence[tuple[object, ...]]) -> list[T]:
        """Call a function of a worker on every rank at once.

        Args:
            call: A method of TrainingWorker, or an importable function whose first argument is the
                worker.
            arguments: One tuple per rank. If ranks share the same object, it is serialized once.

        Returns:
            Results in rank order.

        Raises:
            WorkerError: If a worker died or did not answer in time. Names role, rank and method.
                Errors of the function itself are raised unchanged.
        """

    def run_on_all(self, call: Callable[..., T], *arguments: object) -> list[T]:
        """Call a function of a worker on every rank at once, with the same arguments; see `run`."""
        return self.run(call, [arguments] * self.num_workers)

    @abstractmethod
    def close(self) -> None:
        """Free every rank."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of ranks."""

    @property
    def topology(self) -> Topology:
        """Topology of rank 0; sizes and constraints are the same on every rank."""
        return self.topologies[0]

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks; `update` and `forward` take as many parts."""
        return self.topology.dp.size

    def init(self) -> None:
        """Build the model on every rank."""
        self.topologies = tuple(self.run_on_all(TrainingWorker.init))

    def set_objective(self, objective: Objective) -> None:
        """Set the objective that `update` minimizes."""
        self.run_on_all(TrainingWorker.set_objective, objective)

    def forward(
        self,
        parts: Sequence[PackedBatch],
        *,
        outputs: Collection[HeadOutput],
        sample_ids: Tensor,
        without_adapter: bool = False,
    ) -> ForwardOutputs:
        """Return outputs for one mini-batch.

        Args:
            parts: One part of the mini-batch per data-parallel rank.
            outputs: Outputs of the head to return.
            sample_ids: [B] result order.
            without_adapter: Disable the role's LoRA adapter.
        """
        results = self.run(
            TrainingWorker.forward,
            self._assign_to_ranks([(part, tuple(outputs), without_adapter) for part in parts]),
        )
        return gather_outputs([result.outputs for result in results], sample_ids=sample_ids)

    def evaluate(self, parts: Sequence[PackedBatch]) -> dict[str, Metric]:
        """Return the objective's metrics without gradients, merged over replicas."""
        results = self.run(
            TrainingWorker.evaluate, self._assign_to_ranks([(part,) for part in parts])
        )
        return self._merge([result.metrics for result in results])

    def update(self, parts: Sequence[PackedBatch], *, is_last_of_step: bool) -> UpdateResult:
        """Run one optimizer update on one mini-batch.

        Metrics are merged over replicas; the time is that of the slowest rank.
        """
        # Count before the call: an update that fails halfway may have changed weights, which must
        # not be saved as the previous step's.
        self.num_updates += 1
        results = self.run(
            TrainingWorker.update,
            self._assign_to_ranks([(part, is_last_of_step) for part in parts]),
        )
        # The ids are those of the rank's own samples.
        ids = tuple(sorted({i for result in results for i in result.report.sample_ids}))
        report = results[0].report
        if {r.report.outcome for r in results} != {report.outcome}:
            raise EngineStateError(
                f"ranks of {self.role} disagree on the outcome of an update: "
                f"{[r.report.outcome for r in results]}. Report this to the engine's maintainers."
            )
        return UpdateResult(
            report=type(report)(grad_norm=report.grad_norm, outcome=report.outcome, sample_ids=ids),
            lr=results[0].lr,
            elapsed_s=max(result.elapsed_s for result in results),
            metrics=self._merge([result.metrics for result in results]),
        )

    def release_cache(self) -> None:
        """Empty the CUDA cache on every rank."""
        self.run_on_all(TrainingWorker.release_cache)

    def write_part(self, directory: str) -> list[PartReport]:
        """Write the role's part of a checkpoint; return the files of every rank."""
        return self.run_on_all(TrainingWorker.write_part, directory)

    def require(self, capability: Capability) -> None:
        """Check that the role's engine has a capability.

        Raises:
            CapabilityError: If not. Names the engine and the capability.
        """
        self.run_on_all(TrainingWorker.require, capability)

    def stage_part(self, directory: str) -> None:
        """Copy the state of every rank, and write the copies in the background."""
        self.run_on_all(TrainingWorker.stage_part, directory)

    def has_written_part(self) -> bool:
        """Return True if every rank has written its staged state."""
        return all(self.run_on_all(TrainingWorker.has_written_part))

    def finish_part(self) -> list[PartReport]:
        """Wait until every rank has written its staged state; return the files."""
        return self.run_on_all(TrainingWorker.finish_part)

    def read_part(self, directory: str) -> None:
        """Restore the role from its part in a checkpoint."""
        self.run_on_all(TrainingWorker.read_part, directory)

    def _assign_to_ranks(self, parts: Sequence[tuple[object, ...]]) -> list[tuple[object, ...]]:
        """Return each rank's arguments, given those for each data-parallel rank.

        All ranks of a model-parallel replica get the same object, so that `run` can send it once.
        """
        if len(parts) != self.dp_size:
            raise EngineStateError(
                f"{self.role} has {self.dp_size} data-parallel ranks, but got {len(parts)} parts: "
                "pass one per data-parallel rank."
            )
        return [parts[topology.dp.rank] for topology in self.topologies]

    def _merge(self, metrics: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
        """Merge the metrics of one rank per model-parallel replica."""
        # The other ranks of a replica report the same numbers, which must not count twice.
        return merge_metrics(
            m
            for m, topology in zip(metrics, self.topologies, strict=True)
            if topology.returns_outputs
        )


class InlineWorkerGroup(WorkerGroup):
    """A role of one rank in the driver's process.

    Some engines change process-wide settings of torch while they compute: float32 matmul kernels
    on a CPU (`fast_float32_matmul`) and deterministic algorithms. torch has no such settings per
    thread, so a sampler in another thread would compute with them or without them, depending on
    timing. Such a role holds `compute_lock` during its calls, and the sampler during each forward
    pass.
    """

    def __init__(
        self,
        role: str,
        *,
        engine_name: str,
        config: EngineConfig,
        is_deprecated: bool = False,
        compute_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(role)
        is_on_cpu = config.device == "cpu" or not torch.cuda.is_available()
        changes_settings = is_on_cpu or config.deterministic
        self._compute_lock = compute_lock if compute_lock and changes_settings else nullcontext()
        self._worker = make_worker(
            engine_name=engine_name, config=config, num_threads=None, is_deprecated=is_deprecated
        )

    @property
    def num_workers(self) -> int:
        """Always 1."""
        return 1

    def run(self, call: Callable[..., T], arguments: Sequence[tuple[object, ...]]) -> list[T]:
        """Call the function in this process, with the lock if this role needs it."""
        (only_rank,) = arguments
        with self._compute_lock, track_wait(f"{self.role}: {call.__qualname__} in this process"):
            return [call_worker(self._worker, call, only_rank)]

    def close(self) -> None:
        """Free the engine."""
        self._worker.close()
