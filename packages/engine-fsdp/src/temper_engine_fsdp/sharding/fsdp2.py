"""Sharding with torch's fully_shard (FSDP2): parameters are DTensors, cut by rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from temper_engine_api.errors import ConfigError
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.packed_model import PREFIX, PackedModel, layers_of
from temper_engine_fsdp.runtime.numerics import dtype_named
from temper_engine_fsdp.sharding.sharded_parameter import Parameters, RowSharded

_RESETS_AFTER_ERRORS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


Fill = Callable[[nn.Module], None]
"""Gives weights to a module that is about to be sharded."""


class RowShardedModule:
    """Decoder layers by ones or by groups, then the rest as one; see ``strategies.ShardedModule``."""

    def __init__(self, model: PackedModel, *, config: FSDPConfig, mesh: DeviceMesh, host_mesh: DeviceMesh, fill: Fill) -> None:
        precision = config.precision
        # Inputs are cast nowhere: temperatures and rotary tables stay as they are computed.
        policy = MixedPrecisionPolicy(
            param_dtype=None if precision.compute == precision.parameters else dtype_named(precision.compute),
            reduce_dtype=dtype_named(precision.reduce),
            cast_forward_inputs=False,
        )
        reshards = _checked_reshard(config.reshard_after_forward, num_shards=mesh.size(mesh.ndim - 1))
        wrapped = []
        for group in _groups(layers_of(model.hf, names=config.wrap_modules), size=config.wrap_together):
            for layer in group:
                fill(layer)
            fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
            wrapped.append(_first_of(group))
        fill(model)
        # The root holds the embedding and the head, which the backward pass needs first.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.root: nn.Module = model
        self.loss_factor = 1.0
        self.evaluation_reads_gradients = False
        self._reshards = reshards is not False
        self._gathers_ahead = not self._reshards and not config.residency.offload_parameters and mesh.size(mesh.ndim - 1) > 1
        # One of each group: what is asked of it is asked of the others.
        self._modules = [_first_of([model]), *wrapped]
        for module in self._modules:
            # Gradients are summed, never averaged, because the denominators of a loss already belong to the whole mini-batch. On the
            # root alone this would be silently wrong, and gloo has no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        _prefetch(wrapped, ahead=config.forward_prefetch)
        names = ((name.removeprefix(PREFIX), parameter) for name, parameter in model.named_parameters())
        self.parameters: Parameters = {name: RowSharded(name, parameter, mesh=mesh, host_mesh=host_mesh) for name, parameter in names}

    @contextmanager
    def micro_batch(self, *, reduces: bool, is_last: bool) -> Iterator[None]:
        """See ShardedModule."""
        self._modules[0].set_requires_gradient_sync(reduces)
        self._modules[0].set_reshard_after_backward(self._reshards or is_last)
        yield

    def end_pass(self) -> None:
        """See ShardedModule."""
        for module in self._modules:
            module.reshard()

    def gather_ahead(self) -> None:
        """See ShardedModule."""
        if self._gathers_ahead:
            for module in self._modules:
                module.unshard()

    def recover(self) -> None:
        """See ShardedModule."""
        if _RESETS_AFTER_ERRORS:
            self._modules[0].reset_iter_state()


def _groups(layers: Sequence[nn.Module], *, size: int) -> list[list[nn.Module]]:
    """Runs of so many layers, of which the last one may be shorter."""
    for outer in layers if size > 1 else ():
        if inner := next((layer for layer in layers if layer is not outer and layer in outer.modules()), None):
            raise ConfigError(
                f"wrap_together is {size}, but of wrap_modules a {type(outer).__name__} holds a {type(inner).__name__}, and only modules "
                "that follow each other can be gathered as one: name one of them, or leave wrap_together at 1."
            )
    return [list(layers[first : first + size]) for first in range(0, len(layers), size)]


def _first_of(group: Sequence[nn.Module]) -> FSDPModule:
    first = group[0]
    assert isinstance(first, FSDPModule), "fully_shard makes one of every module"
    return first


def _checked_reshard(wanted: bool | int, *, num_shards: int) -> bool | int:
    if isinstance(wanted, bool) or num_shards == 1:
        return bool(wanted)
    if num_shards % wanted:
        raise ConfigError(f"reshard_after_forward is {wanted}, but must divide the {num_shards} shards, or be true or false.")
    return wanted if 1 < wanted < num_shards else wanted == num_shards


def _prefetch(layers: Sequence[FSDPModule], *, ahead: int) -> None:
    for i, layer in enumerate(layers):
        following = list(layers[i + 1 : i + 1 + ahead])
        if following:
            layer.set_modules_to_forward_prefetch(following)
