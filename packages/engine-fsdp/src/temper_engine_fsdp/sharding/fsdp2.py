"""Sharding with torch's fully_shard (FSDP2): parameters are DTensors, cut by rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from temper_engine_api.errors import ConfigError
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.packed_model import PREFIX, PackedModel, find_layers
from temper_engine_fsdp.runtime.numerics import torch_dtype
from temper_engine_fsdp.sharding.sharded_parameter import FSDP2Parameter, ShardedParameters

_HAS_RESET_ITER_STATE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


Materialize = Callable[[nn.Module], None]
"""Gives weights to a module that is about to be sharded."""


class FSDP2Module:
    """Decoder layers by ones or by groups, then the rest as one; see ``strategies.ShardedModule``."""

    def __init__(
        self,
        model: PackedModel,
        *,
        config: FSDPConfig,
        mesh: DeviceMesh,
        host_mesh: DeviceMesh,
        materialize: Materialize,
    ) -> None:
        precision = config.precision
        # Inputs are cast nowhere: temperatures and rotary tables stay as they are computed.
        policy = MixedPrecisionPolicy(
            param_dtype=None
            if precision.compute == precision.parameters
            else torch_dtype(precision.compute),
            reduce_dtype=torch_dtype(precision.reduce),
            cast_forward_inputs=False,
        )
        reshards = _resolve_reshard(
            config.reshard_after_forward, num_shards=mesh.size(mesh.ndim - 1)
        )
        wrapped = []
        for group in _group_layers(
            find_layers(model.hf, names=config.wrap_modules), size=config.wrap_together
        ):
            for layer in group:
                materialize(layer)
            fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
            wrapped.append(_first_module(group))
        materialize(model)
        # The root holds the embedding and the head, which the backward pass needs first.
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.root: nn.Module = model
        self.loss_factor = 1.0
        self.eval_needs_gradients = False
        self._reshards = reshards is not False
        self._keeps_gathered = (
            not self._reshards
            and not config.residency.offload_parameters
            and mesh.size(mesh.ndim - 1) > 1
        )
        # One of each group: what is asked of it is asked of the others.
        self._modules = [_first_module([model]), *wrapped]
        for module in self._modules:
            # Gradients are summed, never averaged, because the denominators of a loss already belong to the whole mini-batch. On the
            # root alone this would be silently wrong, and gloo has no scaled sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        _set_forward_prefetch(wrapped, num_ahead=config.forward_prefetch)
        names = (
            (name.removeprefix(PREFIX), parameter) for name, parameter in model.named_parameters()
        )
        self.parameters: ShardedParameters = {
            name: FSDP2Parameter(name, parameter, mesh=mesh, host_mesh=host_mesh)
            for name, parameter in names
        }

    @contextmanager
    def micro_batch(self, *, reduces: bool, is_last: bool) -> Iterator[None]:
        """See ShardedModule."""
        self._modules[0].set_requires_gradient_sync(reduces)
        self._modules[0].set_reshard_after_backward(self._reshards or is_last)
        yield

    def reshard(self) -> None:
        """See ShardedModule."""
        for module in self._modules:
            module.reshard()

    def prefetch_parameters(self) -> None:
        """See ShardedModule."""
        if self._keeps_gathered:
            for module in self._modules:
                module.unshard()

    def reset(self) -> None:
        """See ShardedModule."""
        if _HAS_RESET_ITER_STATE:
            self._modules[0].reset_iter_state()


def _group_layers(layers: Sequence[nn.Module], *, size: int) -> list[list[nn.Module]]:
    """Runs of so many layers, of which the last one may be shorter."""
    for outer in layers if size > 1 else ():
        if inner := next(
            (layer for layer in layers if layer is not outer and layer in outer.modules()), None
        ):
            raise ConfigError(
                f"wrap_together is {size}, but of wrap_modules a {type(outer).__name__} holds a "
                f"{type(inner).__name__}, and only modules "
                "that follow each other can be gathered as one: name one of them, or leave "
                "wrap_together at 1."
            )
    return [list(layers[first : first + size]) for first in range(0, len(layers), size)]


def _first_module(group: Sequence[nn.Module]) -> FSDPModule:
    first = group[0]
    assert isinstance(first, FSDPModule), "fully_shard makes one of every module"
    return first


def _resolve_reshard(requested: bool | int, *, num_shards: int) -> bool | int:
    if isinstance(requested, bool) or num_shards == 1:
        return bool(requested)
    if num_shards % requested:
        raise ConfigError(
            f"reshard_after_forward is {requested}, but must divide the {num_shards} shards, or be "
            "true or false."
        )
    return requested if 1 < requested < num_shards else requested == num_shards


def _set_forward_prefetch(layers: Sequence[FSDPModule], *, num_ahead: int) -> None:
    for i, layer in enumerate(layers):
        following = list(layers[i + 1 : i + 1 + num_ahead])
        if following:
            layer.set_modules_to_forward_prefetch(following)
