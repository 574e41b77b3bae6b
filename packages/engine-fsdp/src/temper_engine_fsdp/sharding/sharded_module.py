"""What the two generations of FSDP have in common, as the rest of the engine sees them; and the choice between them."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.activation_checkpointing import checkpoint_layers
from temper_engine_fsdp.model.packed_model import PackedModel, compile_layers, find_layers
from temper_engine_fsdp.sharding.fsdp1 import FSDP1Module
from temper_engine_fsdp.sharding.fsdp2 import FSDP2Module, Materialize
from temper_engine_fsdp.sharding.sharded_parameter import ShardedParameters


class ShardedModule(Protocol):
    """A module whose parameters are sharded over ranks, and how passes through it are bracketed."""

    root: nn.Module
    """What is called."""
    parameters: ShardedParameters
    """Sharded master weights."""
    loss_factor: float
    """What a loss is multiplied with so that gradients are summed over ranks."""
    eval_needs_gradients: bool
    """Whether gradients that wait must be on the device in an evaluation too: FSDP1 makes views of them after each forward pass."""

    def micro_batch(self, *, reduces: bool, is_last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of one micro-batch of a training pass.

        Args:
            reduces: sum gradients over ranks in its backward pass; else they stay local and add up.
            is_last: no other micro-batch of this pass follows.
        """

    def reshard(self) -> None:
        """Free gathered parameters: they are copies, and none may outlive a change of their shards."""

    def prefetch_parameters(self) -> None:
        """Gather what the next pass needs, where it would keep that anyway: the host's part is done while the device still updates.

        Shards must not change until then, unless ``end_pass`` comes before.
        """

    def reset(self) -> None:
        """Begin anew after an exception in a pass; gradients that were accumulated on this rank are lost."""


def shard_model(
    model: PackedModel,
    *,
    config: FSDPConfig,
    mesh: DeviceMesh,
    host_mesh: DeviceMesh,
    materialize: Materialize,
) -> ShardedModule:
    """Shard a model with the strategy that is configured; under fsdp2 ``fill`` is called on each module before it is sharded.

    Raises:
        ConfigError: a class named in wrap_modules does not occur, or reshard_after_forward does not divide the shards.
    """
    if config.activation_checkpointing:
        checkpoint_layers(model.hf, config=config)
    if config.compile_layers:
        compile_layers(find_layers(model.hf, names=config.wrap_modules))
    if config.strategy == "fsdp1":
        return FSDP1Module(model, config=config, mesh=mesh, host_mesh=host_mesh)
    return FSDP2Module(
        model, config=config, mesh=mesh, host_mesh=host_mesh, materialize=materialize
    )
