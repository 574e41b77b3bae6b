"""One rank of one role: an engine behind a few methods whose arguments and results are plain values."""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TypeVar

import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint import PartReport
from temper_engine_api.engine import BaseEngine, UpdateReport
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import HeadOutput, Objective
from temper_engine_api.outputs import StepResult
from temper_engine_api.registry import load_engine_class
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology
from temper_engine_api.weights import WeightStream
from temper_trainer.config.run import LEGACY_TRAINING_WORKER, LEGACY_WORKER_GROUP

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one optimiser update did on one rank."""

    report: UpdateReport
    """Norm and outcome, the same on every rank."""
    lr: float
    """Rate that this update used."""
    elapsed_s: float
    """Wall time of forward, backward and step."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """This rank's part."""


class TrainingWorker:
    """An engine with its objective; ``CriticWorker`` and the reference policy are the same with another head or no optimiser."""

    def __init__(self, *, engine_name: str, config: EngineConfig, num_threads: int | None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._engine: BaseEngine = load_engine_class(engine_name)(config)
        self._advances_per_update = config.schedule.advance == "update"

    def init(self) -> Topology:
        """Build the model; collective over the role's ranks."""
        self._engine.init_model()
        return self._engine.topology

    def set_objective(self, objective: Objective) -> None:
        """What ``update`` minimises from now on."""
        self._engine.set_loss_fn(objective)

    def forward(
        self, part: PackedBatch, outputs: Collection[HeadOutput], without_adapter: bool = False
    ) -> StepResult:
        """Answers without gradients, in input order; None as outputs where this rank returns none."""
        base_alone = self._engine.disable_adapter() if without_adapter else nullcontext()
        with self._engine.eval_mode(), base_alone:
            return self._engine.forward_backward_batch(part, forward_only=True, outputs=outputs)

    def evaluate(self, part: PackedBatch) -> StepResult:
        """The objective's loss and metrics without gradients."""
        with self._engine.eval_mode():
            return self._engine.forward_backward_batch(part, forward_only=True)

    def update(self, part: PackedBatch, is_last_of_step: bool) -> UpdateResult:
        """One optimiser update from this rank's share of a mini-batch.

        Args:
            part: the share.
            is_last_of_step: whether a schedule that counts RL steps advances now.
        """
        begin = time.perf_counter()
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
        """Give the device back what its allocator keeps for later, so that another process there can take it."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def export_weights(self) -> WeightStream:
        """Full tensors under Hugging Face names; collective over the role's ranks."""
        return self._engine.export_weights()

    def export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """What the two files of Hugging Face PEFT hold; collective over the role's ranks."""
        return self._engine.export_adapter()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of its role."""
        return self._engine.topology.global_rank == 0

    def write_part(self, directory: str) -> PartReport:
        """This rank's files of the role's part of a checkpoint."""
        return self._engine.write_part(directory)

    def require(self, capability: Capability) -> None:
        """Refuse with a sentence what the engine does not offer."""
        self._engine.require(capability)

    def stage_part(self, directory: str) -> None:
        """Copy the state now, and write it while other methods are called; ``finish_part`` comes before the next one."""
        self._engine.stage_part(directory)

    def has_written_part(self) -> bool:
        """Whether ``finish_part`` need not wait."""
        return self._engine.has_written_part

    def finish_part(self) -> PartReport:
        """This rank's files of what ``stage_part`` began."""
        return self._engine.finish_part()

    def read_part(self, directory: str) -> None:
        """Restore what ``write_part`` wrote."""
        self._engine.read_part(directory)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()


def make_worker(
    *, engine_name: str, config: EngineConfig, num_threads: int | None, is_deprecated: bool
) -> TrainingWorker:
    """The worker of one rank.

    Args:
        engine_name: as in ``model_engine``.
        config: of that engine.
        num_threads: CPU threads of torch; None leaves them.
        is_deprecated: take the worker that the entry-point group of deprecated workers offers.
    """
    kind: type[TrainingWorker] = TrainingWorker
    if is_deprecated:
        (point,) = entry_points(group=LEGACY_WORKER_GROUP, name=LEGACY_TRAINING_WORKER)
        kind = point.load()
    return kind(engine_name=engine_name, config=config, num_threads=num_threads)


def call_worker(worker: TrainingWorker, call: Callable[..., T], arguments: tuple[object, ...]) -> T:
    """A method of ``TrainingWorker`` as the worker's own class has it; any other function with the worker as its first argument."""
    if vars(TrainingWorker).get(call.__name__) is call:
        own: Callable[..., T] = getattr(worker, call.__name__)
        return own(*arguments)
    return call(worker, *arguments)


class CriticWorker(TrainingWorker):
    """A TrainingWorker whose engine has a value head; its configuration says so."""
