"""FSDPEngine: the engine of engine-api on PyTorch FSDP, for Hugging Face causal language models."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from temper_engine_api.batch import PackedBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.checkpoint import run_on_every_rank
from temper_engine_api.checkpoint.saved_state import (
    SavedState,
    has_safetensors_state,
    open_safetensors_state,
)
from temper_engine_api.determinism import use_deterministic_algorithms
from temper_engine_api.distributed.process_group import gather_objects
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError, CapabilityError, EngineStateError
from temper_engine_api.metrics import LazyMetrics, Metric
from temper_engine_api.objective import (
    ROUTED_EXPERTS,
    HeadOutput,
    HeadOutputs,
    MicroBatchLoss,
    check_routed_experts,
)
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Axis, PlanConstraints, Topology
from temper_engine_api.weights import NamedWeight, TrainingState, check_saved_entries
from temper_engine_fsdp.checkpoint import training_checkpoint, weight_export
from temper_engine_fsdp.components import EngineComponents, build_components, check_model
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.runtime import numerics, process_group
from temper_engine_fsdp.runtime.performance import measure_memory
from temper_engine_fsdp.training.sharded_optimizer import ShardedAdamW

if TYPE_CHECKING:
    from temper_engine_fsdp.training.lora_adapter import LoraAdapter


ObjectT = TypeVar("ObjectT")


class FSDPEngine(BaseEngine):
    """One rank of an engine with sharded parameters, gradients and optimizer states."""

    config: FSDPConfig
    config_class: ClassVar[type[EngineConfig]] = FSDPConfig
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.LANGUAGE_MODEL,
            Capability.VALUE_MODEL,
            Capability.REWARD_MODEL,
            Capability.LOGPROB_AT,
            Capability.ADAPTER,
            Capability.ADAPTER_ON_EXPERTS,
            Capability.OFFLOAD,
            Capability.ANY_OPTIMIZER,
            Capability.FP16,
            Capability.OTHER_DTYPES,
            Capability.DATA_PARALLEL,
            Capability.SEQUENCE_PARALLEL,
            Capability.RESHARD_ON_LOAD,
            Capability.BACKGROUND_SAVE,
            Capability.PORTABLE_STATE,
            Capability.ROUTING_REPLAY,
        }
    )

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._built: EngineComponents | None = None
        self._router_metrics: Mapping[str, Metric] = {}

    @classmethod
    def check_model(cls, config: EngineConfig) -> None:
        """Check that the model and its adapter can be built; allocates no weights."""
        assert isinstance(config, FSDPConfig)
        check_model(config)

    def require(self, *needed: Capability) -> None:
        """Check that the engine claims these capabilities, and has them with its settings.

        Raises:
            CapabilityError: If it does not, or if compiled layers hide the routers to replay.
        """
        super().require(*needed)
        losses = (self.config.router_aux_loss, self.config.router_z_loss)
        if Capability.ROUTING_REPLAY in needed and self.config.compile_layers and not any(losses):
            raise CapabilityError(
                "choices of experts cannot be recorded or replayed, because compile_layers leaves "
                "the routers to the compiler unless they have a loss: set it to false."
            )

    def _build(self) -> Topology:
        self._built = build_components(self.config, loss_scale=self.loss_scale)
        # Sequence-parallel ranks are consecutive and count as one data-parallel rank.
        size, rank, shared = (
            self._built.membership.world_size,
            self._built.membership.rank,
            self.config.sequence_parallel,
        )
        return Topology(
            world_size=size,
            global_rank=rank,
            dp=Axis(size=size // shared, rank=rank // shared),
            sp=Axis(size=shared, rank=rank % shared),
            returns_outputs=rank % shared == 0,
            plan_constraints=PlanConstraints(token_multiple=shared),
        )

    @property
    def _components(self) -> EngineComponents:
        if self._built is None:
            raise EngineStateError(
                "the engine has no model: call init_model() first; the engine cannot be used after "
                "close()."
            )
        return self._built

    def _loaded(self, mode: Literal["train", "eval", "update"]) -> AbstractContextManager[None]:
        # Gathered copies would become stale after an update, and take memory during an evaluation.
        if mode != "train":
            self._components.sharded.reshard()
        return self._components.offload_policy.load_for_mode(mode)

    def to(
        self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True
    ) -> None:
        """Offload or load tensors; gradients of calls with `final=False` stay until reduced."""
        self._check_can_move(device)
        # Gathered copies would keep the device memory that offloading frees.
        self._components.sharded.reshard()
        self._components.offloader.move(device, model=model, optimizer=optimizer)

    @contextmanager
    def _numerics(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._components.uses_fast_matmul:
                stack.enter_context(numerics.use_matmul_precision("medium"))
            if self.config.deterministic:
                stack.enter_context(use_deterministic_algorithms())
            yield

    def _run_micro_batches(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
        reduce_gradients: bool,
    ) -> list[HeadOutputs] | None:
        with_gradient = (
            self._loss_fn_outputs if self._objective is None else self._objective.required_outputs
        )
        self._components.throughput.start(
            None if forward_only else batch.lengths[~batch.is_dummy].tolist()
        )
        with (
            self._components.tracer.stage("a forward call" if forward_only else "a training call"),
            self._numerics(),
        ):
            head_outputs = self._components.runner.run(
                batch,
                requested_outputs=requested_outputs,
                with_gradient=with_gradient,
                micro_batch_loss=micro_batch_loss,
                forward_only=forward_only,
                reduce_gradients=reduce_gradients,
            )
            routers = self._components.routers
            self._router_metrics = {} if routers is None or forward_only else routers.pop_metrics()
        # Sequence-parallel ranks have the same outputs; the first one returns them.
        return head_outputs if self.topology.returns_outputs else None

    def _check_routed_experts(self, batch: PackedBatch) -> None:
        routers = self._components.routers
        if routers is None:
            raise BatchError(
                f"the batch has column {ROUTED_EXPERTS!r}, but the model has no routers that can "
                "replay it: remove it, and set compile_layers to false."
            )
        check_routed_experts(batch, num_layers=routers.num_routers, num_experts=routers.num_experts)

    def _collect_metrics(self) -> Mapping[str, Metric]:
        memory, speed = (
            measure_memory(self._components.membership.device),
            self._components.throughput.stop(),
        )
        routers = self._router_metrics
        return LazyMetrics(lambda: {**memory, **routers, **speed()})

    def _reduce_pending_gradients(self) -> None:
        if self._components.runner.has_unreduced_gradients:
            with self._components.tracer.stage("the reduction of gradients"), self._numerics():
                self._components.runner.reduce_gradients()

    def _apply_gradients(self, *, lr: float) -> float:
        optimizer = self._components.optimizer
        assert optimizer is not None, "the base class rejects updates without an optimizer"
        with self._components.tracer.stage("the update"):
            return optimizer.step(
                lr=lr,
                loss_scale=self.loss_scale.value,
                after_launch=self._components.sharded.prefetch_parameters,
                before_relaunch=self._components.sharded.reshard,
            )

    def optimizer_step(self) -> float:
        """See BaseEngine."""
        norm = super().optimizer_step()
        self._components.profiler.on_update_end()
        return norm

    def _zero_gradients(self) -> None:
        if self._components.runner.has_unreduced_gradients:
            # FSDP cannot drop unreduced gradients: reduce them into `.grad`, then drop those.
            with self._loaded("train"):
                self._reduce_pending_gradients()
        for parameter in self._components.trainable.values():
            parameter.tensor.grad = None

    def _discard_update(self) -> None:
        self._components.runner.discard_gradients()
        for parameter in self._components.trainable.values():
            parameter.tensor.grad = None

    def _export_dtype(self) -> torch.dtype:
        return self._components.compute_dtype

    def _iterate_weights(self) -> Iterator[NamedWeight]:
        components = self._components
        components.file_names.check_known()
        merge = (
            None
            if components.adapter is None
            else partial(components.adapter.merge_weight, adapter_parameters=components.trainable)
        )
        yield from weight_export.iterate_weights(
            components.parameters,
            components.buffers,
            dtype=self._export_dtype(),
            file_names=components.file_names,
            merge=merge,
        )

    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        self._components.file_names.check_known()
        with self._components.tracer.stage("loading weights"):
            weight_export.load_weights(
                self._components.parameters,
                self._components.buffers,
                stream,
                file_names=self._components.file_names,
            )
        if self._components.adapter is not None:
            # Checkpoints must now contain the base weights, which the adapter was not started on.
            self._components.adapter.has_replaced_base = True

    def _disable_adapter(self) -> AbstractContextManager[None]:
        return self._adapter.disabled()

    def _export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        return self._adapter.export(self._components.trainable)

    def _load_adapter(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        self._adapter.load(config, tensors, adapter_parameters=self._components.trainable)

    @property
    def _adapter(self) -> "LoraAdapter":
        assert self._components.adapter is not None, (
            "the base class rejects adapter calls without an adapter"
        )
        return self._components.adapter

    def _iterate_state(self) -> Iterator[TrainingState]:
        components = self._components
        components.file_names.check_known()
        return weight_export.iterate_state(
            components.trainable, self._adamw().adam_states, file_names=components.file_names
        )

    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        components = self._components
        components.file_names.check_known()
        weight_export.load_state(
            components.trainable,
            self._adamw().adam_states,
            stream,
            file_names=components.file_names,
        )

    def _adamw(self) -> ShardedAdamW:
        optimizer = self._components.optimizer
        if optimizer is None:
            raise EngineStateError(
                "the engine has no optimizer (optimizer is null), so it has no training state: "
                "configure one."
            )
        if not isinstance(optimizer, ShardedAdamW):
            raise EngineStateError(
                "this optimizer has no portable training state, only adamw has: set optimizer.name "
                "to adamw, or save a checkpoint."
            )
        return optimizer

    def _write_state(self, directory: str) -> list[str]:
        with self._components.tracer.stage("saving a checkpoint"):
            return training_checkpoint.write_checkpoint(
                self._components,
                config=self.config,
                directory=directory,
                weights=self._iterate_weights(),
            )

    def _stage_state(self) -> Callable[[str], list[str]]:
        with self._components.tracer.stage("copying a checkpoint"):
            group = self._components.saving_group.get()
            return training_checkpoint.stage_checkpoint(
                self._components, config=self.config, group=group, weights=self._iterate_weights()
            )

    def _gather_in_background(self, item: ObjectT) -> list[ObjectT]:
        return self._components.saving_group.gather(item)

    def _read_state(self, directory: str) -> None:
        components, membership = self._components, self._components.membership
        # Another backend's engine may have saved this part of the checkpoint.
        if has_safetensors_state(directory):
            self._load_portable_state(
                open_safetensors_state(directory, partial(safe_open, framework="pt"))
            )
        else:
            # The other ranks would wait in `load` for a rank that cannot read the list.
            saved = run_on_every_rank(
                lambda: training_checkpoint.read_saved_entries(directory),
                gather=self.gather_objects,
            )
            if components.adapter is not None:
                components.adapter.check_base_weights(
                    training_checkpoint.has_any_parameter(saved, components.parameters.keys()),
                    directory=directory,
                )
            with components.tracer.stage("loading a checkpoint"):
                training_checkpoint.load_training_state(
                    training_checkpoint.select_parameters(components),
                    components.buffers,
                    components.optimizer,
                    saved=saved,
                    directory=directory,
                )
        training_checkpoint.load_rng_state(
            directory=directory, rank=membership.rank, device=membership.device
        )

    def _load_portable_state(self, saved: SavedState) -> None:
        """Load a state that another engine saved as safetensors."""
        components = self._components
        if components.adapter is not None:
            components.adapter.check_base_weights(
                bool(components.parameters.keys() & saved.weights.keys()), directory=saved.directory
            )
        expected = weight_export.list_weight_entries(
            training_checkpoint.select_parameters(components),
            {},
            dtype=torch.float32,
            file_names=components.file_names,
        )
        check_saved_entries(expected, saved.list_entries(), directory=saved.directory)
        if components.optimizer is None:
            # `load_weights` expects all names: keep the current values.
            own = (
                NamedWeight(*named)
                for buffer in components.buffers.items()
                for named in components.file_names.split(*buffer)
            )
            weight_export.load_weights(
                training_checkpoint.select_parameters(components),
                components.buffers,
                chain(saved.iterate_weights(), own),
                file_names=components.file_names,
            )
        else:
            self._load_state(saved.iterate_state())
        weight_export.load_portable_buffers(
            components.buffers, saved, file_names=components.file_names
        )

    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        # A copy on the device, since NCCL cannot reduce host tensors and all_reduce is in place.
        total = value.detach().to(self._components.membership.device, copy=True)
        # One rank of each sequence-parallel group: the others have the same samples, which would be
        # counted again.
        if self._components.membership.world_size > 1:
            with self._components.tracer.stage("a sum over ranks"):
                dist.all_reduce(total, group=self._components.data_groups.data_parallel)
        return total.to(value.device)

    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        if self._components.membership.world_size == 1:
            return [item]
        with self._components.tracer.stage("an exchange of objects"):
            return gather_objects(item)

    def close(self) -> None:
        """Free the model and the optimizer, and destroy the process groups made here; idempotent.

        Raises:
            CheckpointError: If a background save failed; everything is freed nevertheless.
        """
        if self._built is None:
            return
        try:
            self.finish_saving()
        finally:
            self._free()

    def _free(self) -> None:
        membership = self._components.membership
        self._components.saving_group.close()
        self._components.tracer.close()
        self._components.profiler.close()
        # The model has reference cycles; collect them before the CUDA cache is emptied.
        self._built, self._topology = None, None
        gc.collect()
        if membership.device.type == "cuda":
            torch.cuda.empty_cache()
        process_group.leave(membership)
