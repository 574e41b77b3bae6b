"""Sharding with fully_shard (FSDP2): parameters are DTensors sharded by rows."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from temper_engine_api.errors import ConfigError, EngineStateError
from temper_engine_api.vision_language import list_encoder_modules
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.packed_model import PREFIX, PackedModel, find_layers
from temper_engine_fsdp.runtime.numerics import torch_dtype
from temper_engine_fsdp.sharding.expert_parallel import ExpertDivider
from temper_engine_fsdp.sharding.sharded_parameter import FSDP2Parameter, ShardedParameters

# Older versions keep stale state after an exception in a pass and offer no way to reset it.
_HAS_RESET_ITER_STATE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


Materialize = Callable[[nn.Module], None]
"""Allocates and loads the weights of a module that is about to be sharded."""


class FSDP2Module:
    """See ShardedModule. Shards each group of decoder layers, then the root."""

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
        # Do not cast inputs: temperatures and rotary tables must stay float32.
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
        self._divider = divider = (
            ExpertDivider(model.hf, mesh=mesh, compute=torch_dtype(precision.compute))
            if config.expert_parallel and mesh.size(mesh.ndim - 1) > 1
            else None
        )
        divided = [] if divider is None else divider.parameters
        encoder = _list_encoder_modules(model.hf)
        layers = find_layers(model.hf, names=config.wrap_modules)
        groups = group_layers(layers, size=config.wrap_together, encoder=encoder)
        wrapped = []
        for group in groups:
            for layer in group:
                materialize(layer)
                if divider is not None:
                    divider.divide(layer)
            fully_shard(
                group,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=reshards,
                ignored_params=set(divided),
            )
            wrapped.append(_first_module(group))
        materialize(model)
        # The root's unit contains the head, whose backward pass comes first: parameters that are
        # freed after the forward pass would be gathered again at once.
        fully_shard(
            model,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=False,
            ignored_params=set(divided),
        )
        self.root: nn.Module = model
        self.loss_factor = 1.0
        self.eval_needs_gradients = False
        self._reshards = reshards is not False
        self._keeps_gathered = (
            not self._reshards and not config.offload.parameters and mesh.size(mesh.ndim - 1) > 1
        )
        # One module per group, since a group shares its FSDP state.
        self._modules = [_first_module([model]), *wrapped]
        self._unused_modules = [module for module in wrapped if cast(nn.Module, module) in encoder]
        """Groups that passes over text do not use; they stay sharded."""
        for module in self._modules:
            # Sum gradients, never average: the denominator of our loss already counts the full
            # mini-batch. Set on every module, because the setting of the root is not inherited.
            # force_sum: gloo has no reduction with a scale factor.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        _set_forward_prefetch(wrapped, num_ahead=config.forward_prefetch)
        self.parameters: ShardedParameters = {
            (name := path.removeprefix(PREFIX)): FSDP2Parameter(
                name, parameter, mesh=mesh, host_mesh=host_mesh
            )
            for path, parameter in model.named_parameters()
        }

    @contextmanager
    def micro_batch(self, *, reduces: bool, is_last: bool) -> Iterator[None]:
        """See ShardedModule."""
        self._modules[0].set_requires_gradient_sync(reduces)
        for module in self._unused_modules:
            # Otherwise FSDP2 looks for local gradients of parameters that were never gathered.
            module.set_requires_gradient_sync(True, recurse=False)
        # Keep parameters gathered between micro-batches if they are not resharded after forward.
        self._modules[0].set_reshard_after_backward(self._reshards or is_last)
        yield
        if reduces and self._divider is not None:
            self._divider.sum_gradients_over_copies()

    def reshard(self) -> None:
        """See ShardedModule."""
        for module in self._modules:
            module.reshard()

    def prefetch_parameters(self) -> None:
        """See ShardedModule."""
        if self._keeps_gathered:
            for module in self._modules:
                if module not in self._unused_modules:
                    module.unshard()

    def reset(self) -> None:
        """See ShardedModule."""
        if _HAS_RESET_ITER_STATE:
            self._modules[0].reset_iter_state()

    def discard_gradients(self) -> None:
        """See ShardedModule.

        Raises:
            EngineStateError: If this version of torch cannot reset FSDP2.
        """
        if not _HAS_RESET_ITER_STATE:
            raise EngineStateError(
                f"torch {torch.__version__} cannot reset FSDP2 after an exception in a training "
                "call, so this engine cannot start another update. save_checkpoint(), close() this "
                "engine, and load the checkpoint in a new one. With torch 2.13, or with strategy "
                "fsdp1, the engine can continue."
            )
        for module in self._modules:
            # Private attributes, because no public function drops these sums: FSDP accumulates the
            # gradients of earlier micro-batches in them, and reset_iter_state() keeps them.
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    # Exists after the first pass.
                    if hasattr(parameter, "_unsharded_param"):
                        parameter.unsharded_param.grad = None


def _list_encoder_modules(hf: PreTrainedModel) -> set[nn.Module]:
    return {
        module
        for name in list_encoder_modules(hf, model_type=hf.config.model_type)
        for module in hf.get_submodule(name).modules()
    }


def group_layers(
    layers: Sequence[nn.Module], *, size: int, encoder: Collection[nn.Module]
) -> list[list[nn.Module]]:
    """Split the layers of the encoder of images, and the rest, into groups of at most `size`."""
    for outer in layers if size > 1 else ():
        if inner := next(
            (layer for layer in layers if layer is not outer and layer in outer.modules()), None
        ):
            raise ConfigError(
                f"wrap_together is {size}, but wrap_modules names {type(outer).__name__}, which "
                f"contains a {type(inner).__name__}, and nested modules cannot be gathered "
                "together: name one of the two, or leave wrap_together at 1."
            )
    parts = (
        [layer for layer in layers if layer in encoder],
        [layer for layer in layers if layer not in encoder],
    )
    return [part[first : first + size] for part in parts for first in range(0, len(part), size)]


def _first_module(group: Sequence[nn.Module]) -> FSDPModule:
    first = group[0]
    assert isinstance(first, FSDPModule), "fully_shard turns every module into an FSDPModule"
    return first


def _resolve_reshard(requested: bool | int, *, num_shards: int) -> bool | int:
    if isinstance(requested, bool) or num_shards == 1:
        return bool(requested)
    return requested if 1 < requested < num_shards else requested == num_shards


def _set_forward_prefetch(layers: Sequence[FSDPModule], *, num_ahead: int) -> None:
    for i, layer in enumerate(layers):
        following = list(layers[i + 1 : i + 1 + num_ahead])
        if following:
            layer.set_modules_to_forward_prefetch(following)
