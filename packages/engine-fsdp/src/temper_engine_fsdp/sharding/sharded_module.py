"""What the two generations of FSDP have in common, as the rest of the engine sees them; and the choice between them."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.activation_checkpointing import checkpoint_layers
from temper_engine_fsdp.model.packed_model import PackedModel, compile_layers, layers_of
from temper_engine_fsdp.sharding.fsdp1 import FlatShardedModule
from temper_engine_fsdp.sharding.fsdp2 import Fill, RowShardedModule
from temper_engine_fsdp.sharding.sharded_parameter import Parameters


class ShardedModule(Protocol):
    """A module whose parameters are sharded over ranks, and how passes through it are bracketed."""

    root: nn.Module
    """What is called."""
    parameters: Parameters
    """Sharded master weights."""
    loss_factor: float
    """What a loss is multiplied with so that gradients are summed over ranks."""
    evaluation_reads_gradients: bool
    """Whether gradients that wait must be on the device in an evaluation too: FSDP1 makes views of them after each forward pass."""

    def micro_batch(self, *, reduces: bool, is_last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of one micro-batch of a training pass.

        Args:
            reduces: sum gradients over ranks in its backward pass; else they stay local and add up.
            is_last: no other micro-batch of this pass follows.
        """

    def end_pass(self) -> None:
        """Free gathered parameters: they are copies, and none may outlive a change of their shards."""

    def gather_ahead(self) -> None:
        """Gather what the next pass needs, where it would keep that anyway: the host's part is done while the device still updates.

        Shards must not change until then, unless ``end_pass`` comes before.
        """

    def recover(self) -> None:
        """Begin anew after an exception in a pass; gradients that were accumulated on this rank are lost."""


def shard(model: PackedModel, *, config: FSDPConfig, mesh: DeviceMesh, host_mesh: DeviceMesh, fill: Fill) -> ShardedModule:
    """Shard a model with the strategy that is configured; under fsdp2 ``fill`` is called on each module before it is sharded.

    Raises:
        ConfigError: a class named in wrap_modules does not occur, or reshard_after_forward does not divide the shards.
    """
    if config.activation_checkpointing:
        checkpoint_layers(model.hf, config=config)
    if config.compile_layers:
        compile_layers(layers_of(model.hf, names=config.wrap_modules))
    if config.strategy == "fsdp1":
        return FlatShardedModule(model, config=config, mesh=mesh, host_mesh=host_mesh)
    return RowShardedModule(model, config=config, mesh=mesh, host_mesh=host_mesh, fill=fill)
