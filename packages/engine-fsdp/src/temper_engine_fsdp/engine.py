"""FSDPEngine: the engine contract on PyTorch FSDP, for Hugging Face decoder-only language models."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from temper_engine_api.batch import PackedBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint.saved_state import SavedState, holds_files
from temper_engine_api.engine import BaseEngine, MicroLoss
from temper_engine_api.errors import EngineStateError
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import Answers, Query
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Axis, PlanConstraints, Topology
from temper_engine_api.weights import NamedWeight, TrainingState, check_saved
from temper_engine_fsdp.checkpoint import training_checkpoint, weight_export
from temper_engine_fsdp.checkpoint.weight_export import open_files
from temper_engine_fsdp.components import Parts, build_parts
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.weight_names import check_known
from temper_engine_fsdp.runtime import numerics, process_group
from temper_engine_fsdp.runtime.numerics import dtype_named
from temper_engine_fsdp.runtime.offload import GRADIENTS, OPTIMIZER, PARAMETERS
from temper_engine_fsdp.runtime.performance import WhenRead, memory_metrics
from temper_engine_fsdp.training.sharded_optimizer import ShardedAdamW

if TYPE_CHECKING:
    from temper_engine_fsdp.training.lora_adapter import Adapter

ObjectT = TypeVar("ObjectT")


class FSDPEngine(BaseEngine):
    """One rank of an engine whose parameters, gradients and optimiser states are sharded over data-parallel ranks."""

    config: FSDPConfig
    config_class: ClassVar[type[EngineConfig]] = FSDPConfig
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.LANGUAGE_MODEL,
            Capability.VALUE_MODEL,
            Capability.REWARD_MODEL,
            Capability.LOGPROB_AT,
            Capability.ADAPTER,
            # By its value: engine-api 0.1.1 and those before do not have the name.
            *(each for each in Capability if each.value == "adapter_on_experts"),
            Capability.OFFLOAD,
            Capability.ANY_OPTIMIZER,
            Capability.FP16,
            Capability.OTHER_DTYPES,
            Capability.DATA_PARALLEL,
            Capability.SEQUENCE_PARALLEL,
            Capability.RESHARD_ON_LOAD,
            Capability.BACKGROUND_SAVE,
            Capability.PORTABLE_STATE,
        }
    )

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._built: Parts | None = None

    def _build(self) -> Topology:
        self._built = build_parts(self.config, loss_scale=self.loss_scale)
        size, rank, shared = self._built.membership.world_size, self._built.membership.rank, self.config.sequence_parallel
        return Topology(
            world_size=size,
            global_rank=rank,
            dp=Axis(size=size // shared, rank=rank // shared),
            sp=Axis(size=shared, rank=rank % shared),
            returns_outputs=rank % shared == 0,
            plan_constraints=PlanConstraints(token_multiple=shared),
        )

    @property
    def _parts(self) -> Parts:
        if self._built is None:
            raise EngineStateError("the engine has no model: call init_model() before, and nothing after close().")
        return self._built

    def _resident(self, mode: Literal["train", "eval", "update"]) -> AbstractContextManager[None]:
        if mode != "train":
            self._parts.runner.forget_gathered()
        return self._parts.offloading.around(mode)

    def to(self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True) -> None:
        """Park parameters and gradients, or optimiser states, in host memory, or bring them in, until the next call.

        Contexts bring in what they need meanwhile, and put it back. Gradients of calls with ``final=False`` stay on the device.

        Raises:
            EngineStateError: inside a mode.
        """
        if self._mode is not None:
            raise EngineStateError(f"to({device!r}) inside {self._mode}_mode(): leave the mode before.")
        self._parts.runner.forget_gathered()
        residency = self._parts.residency
        for name, is_meant in ((PARAMETERS, model), (GRADIENTS, model), (OPTIMIZER, optimizer)):
            if is_meant and device == "cpu":
                residency.park(name)
            elif is_meant:
                residency.bring_in(name)

    @contextmanager
    def _numerics(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._parts.has_fast_matmul:
                stack.enter_context(numerics.float32_matmul("medium"))
            if self.config.deterministic:
                stack.enter_context(numerics.deterministic())
            yield

    def _run_schedule(
        self,
        batch: PackedBatch,
        *,
        queries: frozenset[Query],
        micro_loss: MicroLoss | None,
        forward_only: bool,
        reduce_gradients: bool,
    ) -> list[Answers] | None:
        with_gradient = self._rfc_needs if self._objective is None else self._objective.needs
        self._parts.speed.begin(None if forward_only else batch.lengths[~batch.is_dummy].tolist())
        with self._parts.stages.stage("a forward call" if forward_only else "a training call"), self._numerics():
            answers = self._parts.runner.run(
                batch,
                queries=queries,
                with_gradient=with_gradient,
                micro_loss=micro_loss,
                forward_only=forward_only,
                reduce_gradients=reduce_gradients,
            )
        return answers if self.topology.returns_outputs else None

    def _telemetry(self) -> Mapping[str, Metric]:
        memory, speed = memory_metrics(self._parts.membership.device), self._parts.speed.end()
        return WhenRead(lambda: {**memory, **speed()})

    def _reduce_pending_gradients(self) -> None:
        if self._parts.runner.has_local_gradients:
            with self._parts.stages.stage("the reduction of gradients"), self._numerics():
                self._parts.runner.reduce()

    def _apply_gradients(self, *, lr: float) -> float:
        optimizer = self._parts.optimizer
        assert optimizer is not None, "the base class refuses an update without an optimiser"
        with self._parts.stages.stage("the update"):
            return optimizer.step(lr=lr, loss_scale=self.loss_scale.value, then=self._parts.runner.gather_ahead)

    def optimizer_step(self) -> float:
        """See UpdateCycle."""
        norm = super().optimizer_step()
        self._parts.profiler.update_done()
        return norm

    def _zero_gradients(self) -> None:
        if self._parts.runner.has_local_gradients:
            # FSDP keeps them out of reach; once reduced they lie in the parameters, where they can be dropped.
            with self._resident("train"):
                self._reduce_pending_gradients()
        for parameter in self._parts.trained.values():
            parameter.parameter.grad = None

    def _export_dtype(self) -> torch.dtype:
        return dtype_named(self.config.precision.compute)

    def _iterate_weights(self) -> Iterator[NamedWeight]:
        parts = self._parts
        self._check_names()
        merge = None if parts.adapter is None else partial(parts.adapter.merged, trained=parts.trained)
        yield from weight_export.iterate_weights(parts.parameters, parts.buffers, dtype=self._export_dtype(), merge=merge)

    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        self._check_names()
        with self._parts.stages.stage("loading weights"):
            weight_export.load_weights(self._parts.parameters, self._parts.buffers, stream)
        if self._parts.adapter is not None:
            self._parts.adapter.is_on_other_weights = True

    def _adapter_off(self) -> AbstractContextManager[None]:
        return self._adapter.disabled()

    def _export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        return self._adapter.export(self._parts.trained)

    def _load_adapter(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        self._adapter.load(config, tensors, trained=self._parts.trained)

    @property
    def _adapter(self) -> "Adapter":
        assert self._parts.adapter is not None, "the base class refuses calls that need an adapter"
        return self._parts.adapter

    def _check_names(self) -> None:
        check_known(self._parts.hf_config, self._parts.parameters)

    def _iterate_state(self) -> Iterator[TrainingState]:
        self._check_names()
        return weight_export.iterate_state(self._parts.trained, self._require_adamw().moments)

    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        self._check_names()
        weight_export.load_state(self._parts.trained, self._require_adamw().moments, stream)

    def _require_adamw(self) -> ShardedAdamW:
        optimizer = self._parts.optimizer
        if optimizer is None:
            raise EngineStateError("an engine without an optimiser (optimizer: null) has no training state.")
        if not isinstance(optimizer, ShardedAdamW):
            raise EngineStateError("the portable training state is that of adamw: use optimizer.name adamw, or save a checkpoint.")
        return optimizer

    def _write_state(self, directory: str) -> list[str]:
        with self._parts.stages.stage("saving a checkpoint"):
            return training_checkpoint.write_now(self._parts, config=self.config, directory=directory, weights=self._iterate_weights())

    def _stage_state(self) -> Callable[[str], list[str]]:
        with self._parts.stages.stage("copying a checkpoint"):
            group = self._parts.saving_group.get()
            return training_checkpoint.stage(self._parts, config=self.config, group=group, weights=self._iterate_weights())

    def _gather_in_background(self, item: ObjectT) -> list[ObjectT]:
        return self._parts.saving_group.gather(item)

    def _read_state(self, directory: str) -> None:
        parts, membership = self._parts, self._parts.membership
        if holds_files(directory):
            self._read_foreign(open_files(directory))
        else:
            if parts.adapter is not None:
                parts.adapter.expect_weights(training_checkpoint.holds(directory, parts.parameters.keys()), directory=directory)
            with parts.stages.stage("loading a checkpoint"):
                training_checkpoint.read_training(parts.kept, parts.buffers, parts.optimizer, directory=directory)
        training_checkpoint.read_random_state(directory=directory, rank=membership.rank, device=membership.device)

    def _read_foreign(self, saved: SavedState) -> None:
        """What an engine that keeps its state in files has saved."""
        parts = self._parts
        if parts.adapter is not None:
            parts.adapter.expect_weights(bool(parts.parameters.keys() & saved.weights.keys()), directory=saved.directory)
        expected = weight_export.describe_weights(parts.kept, {}, dtype=torch.float32)
        check_saved(expected, saved.entries(), directory=saved.directory)
        if parts.optimizer is None:
            own = (NamedWeight(name, buffer) for name, buffer in parts.buffers.items())
            weight_export.load_weights(parts.kept, parts.buffers, chain(saved.iterate_weights(), own))
        else:
            self._load_state(saved.iterate_state())

    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        total = value.detach().to(self._parts.membership.device, copy=True)
        if self._parts.membership.world_size > 1:
            with self._parts.stages.stage("a sum over ranks"):
                dist.all_reduce(total, group=self._parts.data_groups.across)
        return total.to(value.device)

    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        world_size = self._parts.membership.world_size
        if world_size == 1:
            return [item]
        gathered = [item] * world_size
        with self._parts.stages.stage("an exchange of objects"):
            dist.all_gather_object(gathered, item)
        return gathered

    def close(self) -> None:
        """Free the model and the optimiser, and destroy the process groups that this engine made; closing twice is harmless.

        Raises:
            CheckpointError: a save in the background failed; everything is freed all the same.
        """
        if self._built is None:
            return
        try:
            self.finish_saving()
        finally:
            self._free()

    def _free(self) -> None:
        membership = self._parts.membership
        self._parts.saving_group.close()
        self._parts.stages.close()
        self._parts.profiler.close()
        self._built, self._topology = None, None
        gc.collect()
        if membership.device.type == "cuda":
            torch.cuda.empty_cache()
        process_group.leave(membership)
