"""MegatronEngine: the engine contract on Megatron-Core, for dense Hugging Face decoder-only language models that Megatron-Bridge knows."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from temper_engine_api.batch import PackedBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.engine import BaseEngine, MicroBatchLoss
from temper_engine_api.errors import EngineStateError
from temper_engine_api.metrics import Metric
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.offload import GRADIENTS, OPTIMIZER, PARAMETERS
from temper_engine_api.specs import EngineConfig
from temper_engine_api.topology import Topology
from temper_engine_api.weights import NamedWeight, TrainingState
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.runtime import numerics
from temper_engine_megatron.runtime.known_warnings import ignore_known_warnings

with ignore_known_warnings():
    from temper_engine_megatron.checkpoint import checkpoint_files, training_checkpoint
    from temper_engine_megatron.components import EngineComponents, build_components
    from temper_engine_megatron.runtime.process_groups import leave
    from temper_engine_megatron.weights.sharded_state import ShardedState

if TYPE_CHECKING:
    from temper_engine_megatron.weights.lora_adapter import LoraAdapter

ObjectT = TypeVar("ObjectT")


class MegatronEngine(BaseEngine):
    """One rank of an engine over tensor, pipeline, context and data parallel ranks."""

    config: MegatronConfig
    config_class: ClassVar[type[EngineConfig]] = MegatronConfig
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.LANGUAGE_MODEL,
            Capability.VALUE_MODEL,
            Capability.REWARD_MODEL,
            Capability.LOGPROB_AT,
            Capability.DATA_PARALLEL,
            Capability.TENSOR_PARALLEL,
            Capability.PIPELINE_PARALLEL,
            Capability.CONTEXT_PARALLEL,
            Capability.OFFLOAD,
            Capability.FP16,
            Capability.RESHARD_ON_LOAD,
            Capability.PORTABLE_STATE,
            Capability.ADAPTER,
            # By its value: engine-api 0.1.1 and those before do not have the name.
            *(each for each in Capability if each.value == "adapter_on_experts"),
            Capability.BACKGROUND_SAVE,
        }
    )

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._built: EngineComponents | None = None
        self._router_losses: Mapping[str, Tensor] = {}

    def _build(self) -> Topology:
        with ignore_known_warnings():
            self._built = build_components(self.config, loss_scale=self.loss_scale)
        return self._built.membership.topology

    @property
    def _components(self) -> EngineComponents:
        if self._built is None:
            raise EngineStateError(
                "the engine has no model: call init_model() before, and nothing after close()."
            )
        return self._built

    def _loaded(self, mode: Literal["train", "eval", "update"]) -> AbstractContextManager[None]:
        return self._components.offload_policy.mode_context(mode)

    def to(
        self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True
    ) -> None:
        """Park parameters and gradients, or optimiser states, in host memory, or bring them in, until the next call.

        Contexts bring in what they need meanwhile, and put it back.

        Raises:
            EngineStateError: inside a mode.
        """
        if self._mode is not None:
            raise EngineStateError(
                f"to({device!r}) inside {self._mode}_mode(): leave the mode before."
            )
        offloader = self._components.offloader
        for name, is_meant in ((PARAMETERS, model), (GRADIENTS, model), (OPTIMIZER, optimizer)):
            if is_meant and device == "cpu":
                offloader.offload(name)
            elif is_meant:
                offloader.load(name)

    def _numerics(self) -> AbstractContextManager[None]:
        return numerics.deterministic() if self.config.deterministic else nullcontext()

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
                runner.reduce()
        self._router_losses = {} if forward_only else runner.pop_router_losses()
        return head_outputs

    def _collect_metrics(self) -> Mapping[str, Metric]:
        return {
            f"router/{name}": Metric(value=value, reduction="sum")
            for name, value in self._router_losses.items()
        }

    def _reduce_pending_gradients(self) -> None:
        if self._components.runner.has_unreduced_gradients:
            self._components.runner.reduce()

    def _apply_gradients(self, *, lr: float) -> float:
        optimizer = self._components.optimizer
        assert optimizer is not None, "the base class refuses an update without an optimiser"
        with self._numerics():
            if self.config.precision.compute == "fp16":
                self._components.runner.scale_gradients(1.0 / self.loss_scale.value)
            return optimizer.step(lr=lr)

    def _zero_gradients(self) -> None:
        optimizer = self._components.optimizer
        if optimizer is not None:
            with self._components.offloader.loaded(PARAMETERS, GRADIENTS):
                self._components.runner.zero()
                optimizer.zero()

    def _export_dtype(self) -> torch.dtype:
        return self._components.state.compute_dtype

    def _iterate_weights(self) -> Iterator[NamedWeight]:
        adapter = self._components.adapter
        if adapter is None:
            return self._components.state.iterate_weights(dtype=self._export_dtype())
        return self._iterate_merged(adapter)

    def _iterate_merged(self, adapter: "LoraAdapter") -> Iterator[NamedWeight]:
        with self._components.offloader.loaded(OPTIMIZER):
            yield from self._components.state.iterate_weights(
                dtype=self._export_dtype(), merge=adapter.merging()
            )

    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        with self._components.offloader.loaded(OPTIMIZER):
            self._components.state.load_weights(stream)
        if self._components.adapter is not None:
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
            "the base class refuses calls that need an adapter"
        )
        return self._components.adapter

    def _iterate_state(self) -> Iterator[TrainingState]:
        return self._trained_state().iterate_state()

    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        self._trained_state().load_state(stream)

    def _trained_state(self) -> ShardedState:
        if self._components.optimizer is None:
            raise EngineStateError(
                "an engine without an optimiser (optimizer: null) has no training state."
            )
        return self._components.trained

    def _write_state(self, directory: str) -> list[str]:
        return training_checkpoint.write_state(self._components, directory=directory)

    def _stage_state(self) -> Callable[[str], list[str]]:
        return training_checkpoint.stage_checkpoint(self._components)

    def _gather_in_background(self, item: ObjectT) -> list[ObjectT]:
        return self._components.saving_group.gather(item)

    def _read_state(self, directory: str) -> None:
        training_checkpoint.read_state(self._components, directory=directory)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """See BaseEngine; a folder in another system's layout is refused with the command that converts it."""
        if hdfs_path is None:
            checkpoint_files.check_layout_is_ours(local_path)
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        """Each replica has one number, on the rank that returns outputs."""
        mine = value.detach().clone() if self.topology.returns_outputs else torch.zeros_like(value)
        total = mine.to(self._components.membership.device)
        dist.all_reduce(total)
        return total.to(value.device)

    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        gathered = [item] * self.topology.world_size
        dist.all_gather_object(gathered, item)
        return gathered

    def close(self) -> None:
        """Free the model and the optimiser, and the process groups that nobody else uses; closing twice is harmless.

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
        membership = self._components.membership
        self._components.saving_group.close()
        self._built, self._topology = None, None
        gc.collect()
        if membership.device.type == "cuda":
            torch.cuda.empty_cache()
        leave(membership)
