"""One rank of a role: an engine behind methods whose arguments and results can be serialized."""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
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
    """The result of one optimizer update on one rank."""

    report: UpdateReport
    """Gradient norm and outcome, the same on every rank."""
    lr: float
    """Learning rate of this update."""
    elapsed_s: float
    """Wall time of forward, backward and optimizer step."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of this rank."""


class TrainingWorker:
    """An engine with its objective.

    A critic is a TrainingWorker whose engine has a value head; a reference policy has no optimizer.
    """

    def __init__(self, *, engine_name: str, config: EngineConfig, num_threads: int | None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
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
            is_last_of_step: True if a learning-rate schedule that counts RL steps advances now.
        """
        begin = time.perf_counter()
        # Read now, because the schedule may advance below.
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
        """Empty the CUDA cache, so that another process on the GPU can allocate the memory."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def export_weights(self) -> WeightStream:
        """Return a stream of full tensors under Hugging Face names; collective."""
        return self._engine.export_weights()

    def export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        """Return the contents of PEFT's two files, configuration and tensors; collective."""
        return self._engine.export_adapter()

    @property
    def is_first(self) -> bool:
        """True on rank 0 of the role."""
        return self._engine.topology.global_rank == 0

    @cached_property
    def transport_state(self) -> dict[str, object]:
        """State that weight transports keep on this rank between two publishes."""
        return {}

    def write_part(self, directory: str) -> PartReport:
        """Write this rank's files of a checkpoint."""
        return self._engine.write_part(directory)

    def require(self, capability: Capability) -> None:
        """Raise CapabilityError if the engine does not have a capability."""
        self._engine.require(capability)

    def stage_part(self, directory: str) -> None:
        """Copy the state now and write it in the background; call `finish_part` before the next one."""
        self._engine.stage_part(directory)

    def has_written_part(self) -> bool:
        """Return True if `finish_part` would not wait."""
        return self._engine.has_written_part

    def finish_part(self) -> PartReport:
        """Wait for the files that `stage_part` started; return them."""
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
    """Create the worker of one rank.

    Args:
        engine_name: A value of `model_engine`.
        config: Configuration of that engine.
        num_threads: CPU threads of torch; None keeps torch's default.
        is_deprecated: Use the deprecated worker, which legacy-shim registers as an entry point.
    """
    kind: type[TrainingWorker] = TrainingWorker
    if is_deprecated:
        (point,) = entry_points(group=LEGACY_WORKER_GROUP, name=LEGACY_TRAINING_WORKER)
        kind = point.load()
    return kind(engine_name=engine_name, config=config, num_threads=num_threads)


def call_worker(worker: TrainingWorker, call: Callable[..., T], arguments: tuple[object, ...]) -> T:
    """Call a function with the worker as its first argument.

    A method of TrainingWorker is looked up by name first, because a deprecated worker overrides it.
    """
    if vars(TrainingWorker).get(call.__name__) is call:
        method: Callable[..., T] = getattr(worker, call.__name__)
        return method(*arguments)
    return call(worker, *arguments)


class CriticWorker(TrainingWorker):
    """A TrainingWorker whose engine is configured with a value head."""
