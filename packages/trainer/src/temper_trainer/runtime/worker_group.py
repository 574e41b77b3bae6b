"""The driver's view of a role: few methods, each over all ranks, data and outputs dispatched by topology."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint import PartReport
from temper_engine_api.errors import EngineStateError, TemperError
from temper_engine_api.metrics import Metric, merge_metrics
from temper_engine_api.objective import HeadOutput, Objective
from temper_engine_api.outputs import ForwardOutputs, gather_outputs
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology
from temper_trainer.runtime.training_worker import (
    TrainingWorker,
    UpdateResult,
    call_worker,
    make_worker,
)
from temper_trainer.waits import track_wait

T = TypeVar("T")


class WorkerError(TemperError, RuntimeError):
    """A worker died or did not answer in time."""


class FullStoreError(WorkerError):
    """What was sent or answered has no room on its way; the worker itself goes on."""


class WorkerGroup(ABC):
    """All ranks of one role. Implementations differ only in how ``run`` reaches them."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.topologies: tuple[Topology, ...] = ()
        self.num_updates = 0
        """Updates that were begun: while it stays the same, the weights do."""
        self.is_broken = False
        """Whether a rank has died or was given up: nothing more can be asked of the role."""

    @abstractmethod
    def run(self, call: Callable[..., T], arguments: Sequence[tuple[object, ...]]) -> list[T]:
        """Call a function of a worker on every rank at once.

        Args:
            call: ``TrainingWorker.update`` and the like, or any importable function whose first argument is the worker.
            arguments: one tuple per rank.

        Returns:
            Results in rank order.

        Raises:
            WorkerError: a worker died or did not answer in time; names role, rank and method. Errors raised by the method come
                through as they are.
        """

    @abstractmethod
    def close(self) -> None:
        """Free every rank."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Ranks of the role."""

    @property
    def topology(self) -> Topology:
        """Of rank 0; sizes and constraints are the same on every rank."""
        return self.topologies[0]

    @property
    def dp_size(self) -> int:
        """Data-parallel shares that ``update`` and ``forward`` take."""
        return self.topology.dp.size

    def init(self) -> None:
        """Build the model on every rank."""
        self.topologies = tuple(self.run(TrainingWorker.init, [()] * self.num_workers))

    def set_objective(self, objective: Objective) -> None:
        """What ``update`` minimises from now on."""
        self.run(TrainingWorker.set_objective, [(objective,)] * self.num_workers)

    def forward(
        self,
        parts: Sequence[PackedBatch],
        *,
        outputs: Collection[HeadOutput],
        sample_ids: Tensor,
        without_adapter: bool = False,
    ) -> ForwardOutputs:
        """Answers of one mini-batch in the order of ``sample_ids`` [B].

        Args:
            parts: one share per data-parallel rank.
            outputs: what to ask.
            sample_ids: order of the result.
            without_adapter: ask the base of the role's adapter alone.
        """
        results = self.run(
            TrainingWorker.forward,
            [(part, tuple(outputs), without_adapter) for part in self._by_rank(parts)],
        )
        return gather_outputs([result.outputs for result in results], sample_ids=sample_ids)

    def evaluate(self, parts: Sequence[PackedBatch]) -> dict[str, Metric]:
        """The objective's metrics without gradients, merged over replicas."""
        results = self.run(TrainingWorker.evaluate, [(part,) for part in self._by_rank(parts)])
        return self._merge([result.metrics for result in results])

    def update(self, parts: Sequence[PackedBatch], *, is_last_of_step: bool) -> UpdateResult:
        """One optimiser update of one mini-batch; metrics merged over replicas, times are the slowest rank's."""
        self.num_updates += 1
        results = self.run(
            TrainingWorker.update, [(part, is_last_of_step) for part in self._by_rank(parts)]
        )
        ids = tuple(sorted({i for result in results for i in result.report.sample_ids}))
        report = results[0].report
        if {r.report.outcome for r in results} != {report.outcome}:
            raise EngineStateError(
                f"ranks of {self.role} disagree on an update: {[r.report.outcome for r in results]}."
            )
        return UpdateResult(
            report=type(report)(grad_norm=report.grad_norm, outcome=report.outcome, sample_ids=ids),
            lr=results[0].lr,
            elapsed_s=max(result.elapsed_s for result in results),
            metrics=self._merge([result.metrics for result in results]),
        )

    def release_cache(self) -> None:
        """Let every rank give its device back what it keeps for later."""
        self.run(TrainingWorker.release_cache, [()] * self.num_workers)

    def write_part(self, directory: str) -> list[PartReport]:
        """Every rank's files of the role's part of a checkpoint."""
        return self.run(TrainingWorker.write_part, [(directory,)] * self.num_workers)

    def require(self, capability: Capability) -> None:
        """Refuse what the role's engine does not offer.

        Raises:
            CapabilityError: naming the engine and the capability.
        """
        self.run(TrainingWorker.require, [(capability,)] * self.num_workers)

    def stage_part(self, directory: str) -> None:
        """Let every rank copy its state, and write it while the role goes on."""
        self.run(TrainingWorker.stage_part, [(directory,)] * self.num_workers)

    def has_written_part(self) -> bool:
        """Whether every rank has written what was staged."""
        return all(self.run(TrainingWorker.has_written_part, [()] * self.num_workers))

    def finish_part(self) -> list[PartReport]:
        """Wait for every rank's files of what was staged."""
        return self.run(TrainingWorker.finish_part, [()] * self.num_workers)

    def read_part(self, directory: str) -> None:
        """Restore what ``write_part`` wrote."""
        self.run(TrainingWorker.read_part, [(directory,)] * self.num_workers)

    def _by_rank(self, parts: Sequence[PackedBatch]) -> list[PackedBatch]:
        """The same share to every rank of a model-parallel replica."""
        if len(parts) != self.dp_size:
            raise EngineStateError(
                f"{self.role} has {self.dp_size} data-parallel ranks, but {len(parts)} shares were given."
            )
        return [parts[topology.dp.rank] for topology in self.topologies]

    def _merge(self, metrics: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
        """One rank of each replica speaks for it."""
        return merge_metrics(
            m
            for m, topology in zip(metrics, self.topologies, strict=True)
            if topology.returns_outputs
        )


class InlineWorkerGroup(WorkerGroup):
    """A role of one rank in the driver's own process.

    Some engines change settings of torch that belong to the whole process while they compute: float32
    matmul kernels on a CPU (``fast_float32_matmul``) and deterministic algorithms. torch offers
    neither per thread, so a sampler on another thread would compute with them or without them,
    depending on timing. Such a role holds ``compute_lock`` during its calls, as the sampler does
    during each forward pass.
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
        """Call the function here, with the lock if this role needs it."""
        (only,) = arguments
        with self._compute_lock, track_wait(f"{self.role}: {call.__qualname__} in this process"):
            return [call_worker(self._worker, call, only)]

    def close(self) -> None:
        """Free the engine."""
        self._worker.close()
