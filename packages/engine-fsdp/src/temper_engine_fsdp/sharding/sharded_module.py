"""The interface that FSDP1 and FSDP2 share, and the choice between them."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from temper_engine_api.compile_cache import protect_compile_cache
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.activation_checkpointing import checkpoint_layers
from temper_engine_fsdp.model.packed_model import PackedModel, compile_layers, find_layers
from temper_engine_fsdp.sharding.fsdp1 import FSDP1Module
from temper_engine_fsdp.sharding.fsdp2 import FSDP2Module, Materialize
from temper_engine_fsdp.sharding.sharded_parameter import ShardedParameters


class ShardedModule(Protocol):
    """A module with sharded parameters, and the hooks around its passes."""

    root: nn.Module
    """Module to call in a forward pass."""
    parameters: ShardedParameters
    """Sharded master weights by Hugging Face name."""
    loss_factor: float
    """Factor applied to the loss so that gradients are summed across ranks, not averaged."""
    eval_needs_gradients: bool
    """True if pending gradients must be on the device in eval mode too: FSDP1 makes views of them
    after each forward pass."""

    def micro_batch(self, *, reduces: bool, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for the forward and backward pass of one micro-batch in training.

        Args:
            reduces: Reduce gradients across ranks in this backward pass; otherwise accumulate them
                locally.
            is_last: No other micro-batch of this call follows.
        """

    def reshard(self) -> None:
        """Free gathered parameters; required before their shards change or are offloaded."""

    def prefetch_parameters(self) -> None:
        """Gather parameters for the next pass, if they would stay gathered anyway.

        The host can then launch the gathers while the device still runs the optimizer step. Shards
        must not change afterwards unless `reshard` is called first.
        """

    def reset(self) -> None:
        """Reset FSDP after an exception in a pass, so that the next can run; keeps gradients."""

    def discard_gradients(self) -> None:
        """Drop the gradients that FSDP keeps outside of `.grad`, after `reset`. Not collective."""


def shard_model(
    model: PackedModel,
    *,
    config: FSDPConfig,
    mesh: DeviceMesh,
    host_mesh: DeviceMesh,
    materialize: Materialize,
) -> ShardedModule:
    """Shard a model with the configured strategy. Collective.

    Args:
        model: The model; its parameters may be on the meta device with fsdp2.
        config: Engine config.
        mesh: Mesh for tensors on the device.
        host_mesh: Mesh for tensors in host memory.
        materialize: With fsdp2, called on each module before it is sharded.

    Raises:
        ConfigError: If a class in wrap_modules does not occur, or reshard_after_forward does not
            divide the shard count.
    """
    # Checkpoint and compile before FSDP wraps the layers, so that both are inside the hooks of
    # FSDP.
    if config.activation_checkpointing:
        checkpoint_layers(model.hf, config=config)
    if config.compile_layers:
        protect_compile_cache()
        compile_layers(find_layers(model.hf, names=config.wrap_modules))
    if config.strategy == "fsdp1":
        return FSDP1Module(model, config=config, mesh=mesh, host_mesh=host_mesh)
    return FSDP2Module(
        model, config=config, mesh=mesh, host_mesh=host_mesh, materialize=materialize
    )
