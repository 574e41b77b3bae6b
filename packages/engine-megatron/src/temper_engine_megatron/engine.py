"""MegatronEngine: the engine of engine-api on Megatron-Core, for Hugging Face decoder models.

Dense models and mixtures of experts that Megatron-Bridge can translate.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from temper_engine_api.batch import PackedBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.determinism import use_deterministic_algorithms
from temper_engine_api.distributed.process_group import gather_objects
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import EngineStateError
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import HeadOutput, HeadOutputs, MicroBatchLoss
from temper_engine_api.offload import GRADIENTS, OPTIMIZER, PARAMETERS
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology
from temper_engine_api.weights import NamedWeight, TrainingState
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.runtime.known_warnings import ignore_known_warnings

# Importing Megatron-Core emits warnings.
with ignore_known_warnings():
    from temper_engine_megatron.checkpoint import training_checkpoint
    from temper_engine_megatron.components import EngineComponents, build_components, check_model
    from temper_engine_megatron.runtime.process_groups import connect_stages, leave_groups
    from temper_engine_megatron.weights.sharded_state import ShardedState

if TYPE_CHECKING:
    from temper_engine_megatron.weights.lora_adapter import LoraAdapter

ObjectT = TypeVar("ObjectT")


class MegatronEngine(BaseEngine):
    """One rank of an engine with tensor, pipeline, context, expert and data parallelism."""

    config: MegatronConfig
    config_class: ClassVar[type[EngineConfig]] = MegatronConfig
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.LANGUAGE_MODEL,
            Capability.VALUE_MODEL,
            Capability.REWARD_MODEL,
            Capability.LOGPROB_AT,
            Capability.ROUTING_REPLAY,
            Capability.DATA_PARALLEL,
            Capability.TENSOR_PARALLEL,
            Capability.PIPELINE_PARALLEL,
            Capability.CONTEXT_PARALLEL,
            Capability.OFFLOAD,
            Capability.FP16,
            Capability.RESHARD_ON_LOAD,
            Capability.PORTABLE_STATE,
            Capability.ADAPTER,
            Capability.ADAPTER_ON_EXPERTS,
            Capability.BACKGROUND_SAVE,
        }
    )

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._built: EngineComponents | None = None
        self._router_metrics: Mapping[str, Metric] = {}

    @classmethod
    def check_model(cls, config: EngineConfig) -> None:
        """Check architecture, adapted modules, optimizer and overrides; allocates no weights."""
        assert isinstance(config, MegatronConfig)
        check_model(config)

    def _build(self) -> Topology:
        with ignore_known_warnings():
            self._built = build_components(self.config, loss_scale=self.loss_scale)
        return self._built.membership.topology

    def _connect_ranks(self) -> None:
        super()._connect_ranks()
        connect_stages(self._components.membership, self._components.chunks.transformer_config)

    @property
    def _components(self) -> EngineComponents:
        if self._built is None:
            raise EngineStateError(
                "the engine has no model: call init_model() first; the engine cannot be used after "
                "close()."
            )
        return self._built

    def _loaded(self, mode: Literal["train", "eval", "update"]) -> AbstractContextManager[None]:
        return self._components.offload_policy.load_for_mode(mode)

    def to(
        self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True
    ) -> None:
        self._check_can_move(device)
        self._components.offloader.move(device, model=model, optimizer=optimizer)

    def _numerics(self) -> AbstractContextManager[None]:
        return use_deterministic_algorithms() if self.config.deterministic else nullcontext()

    def _run_micro_batches(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
        reduce_gradients: bool,
    ) -> list[HeadOutputs] | None:
        runner = self._components.runner
        with self._numerics():
            head_outputs = runner.run(
                batch,
                requested_outputs=requested_outputs,
                micro_batch_loss=micro_batch_loss,
                forward_only=forward_only,
            )
            if reduce_gradients:
                runner.reduce_gradients()
        self._router_metrics = {} if forward_only else runner.pop_router_metrics()
        return head_outputs

    def _check_routed_experts(self, batch: PackedBatch) -> None:
        self._components.runner.check_routed_experts(batch)

    def _collect_metrics(self) -> Mapping[str, Metric]:
        return self._router_metrics

    def _reduce_pending_gradients(self) -> None:
        if self._components.runner.has_unreduced_gradients:
            self._components.runner.reduce_gradients()

    def _apply_gradients(self, *, lr: float) -> float:
        optimizer = self._components.optimizer
        assert optimizer is not None, "the base class rejects updates without an optimizer"
        with self._numerics():
            if self.config.precision.compute == "fp16":
                self._components.runner.scale_gradients(1.0 / self.loss_scale.value)
            return optimizer.step(lr=lr)

    def _zero_gradients(self) -> None:
        optimizer = self._components.optimizer
        if optimizer is not None:
            # Megatron zeroes its buffers in place, so they must be on the device.
            with self._components.offloader.loaded(PARAMETERS, GRADIENTS):
                self._components.runner.zero_gradients()
                optimizer.zero_grad()

    def _discard_update(self) -> None:
        self._components.runner.discard_call()
        self._zero_gradients()

    def _export_dtype(self) -> torch.dtype:
        return self._components.base_state.compute_dtype

    def _iterate_weights(self) -> Iterator[NamedWeight]:
        adapter = self._components.adapter
        if adapter is None:
            return self._components.base_state.iterate_weights(dtype=self._export_dtype())
        return self._iterate_merged_weights(adapter)

    def _iterate_merged_weights(self, adapter: "LoraAdapter") -> Iterator[NamedWeight]:
        # Merging reads the adapter's master weights.
        with self._components.offloader.loaded(OPTIMIZER):
            yield from self._components.base_state.iterate_weights(
                dtype=self._export_dtype(), merge=adapter.make_merge()
            )

    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        with self._components.offloader.loaded(OPTIMIZER):
            self._components.base_state.load_weights(stream)
        if self._components.adapter is not None:
            # Checkpoints must now contain the base weights, which the adapter was not started on.
            self._components.adapter.has_replaced_base = True

    def _disable_adapter(self) -> AbstractContextManager[None]:
        return self._adapter.disabled()

    def _export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        with self._components.offloader.loaded(OPTIMIZER):
            return self._adapter.export()

    def _load_adapter(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        with self._components.offloader.loaded(OPTIMIZER):
            self._adapter.load(config, tensors)

    @property
    def _adapter(self) -> "LoraAdapter":
        assert self._components.adapter is not None, (
            "the base class rejects adapter calls without an adapter"
        )
        return self._components.adapter

    def _iterate_state(self) -> Iterator[TrainingState]:
        return self._trainable_state().iterate_state()

    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        self._trainable_state().load_state(stream)

    def _trainable_state(self) -> ShardedState:
        if self._components.optimizer is None:
            raise EngineStateError(
                "the engine has no optimizer (optimizer is null), so it has no training state: "
                "configure one."
            )
        return self._components.trainable_state

    def _write_state(self, directory: str) -> list[str]:
        return training_checkpoint.write_checkpoint(self._components, directory=directory)

    def _stage_state(self) -> Callable[[str], list[str]]:
        return training_checkpoint.stage_checkpoint(self._components)

    def _gather_in_background(self, item: ObjectT) -> list[ObjectT]:
        return self._components.saving_group.gather(item)

    def _read_state(self, directory: str) -> None:
        training_checkpoint.load_training_state(self._components, directory=directory)

    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        # The ranks of a replica have the same value; only the one that returns outputs counts.
        local = value.detach().clone() if self.topology.returns_outputs else torch.zeros_like(value)
        total = local.to(self._components.membership.device)
        dist.all_reduce(total)
        return total.to(value.device)

    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        return gather_objects(item)

    def close(self) -> None:
        """Free the model and the optimizer, and destroy unused process groups; idempotent.

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
        self._components.chunks.release()
        # The model has reference cycles; collect them before the CUDA cache is emptied.
        self._built, self._topology = None, None
        gc.collect()
        if membership.device.type == "cuda":
            torch.cuda.empty_cache()
        leave_groups(membership)
