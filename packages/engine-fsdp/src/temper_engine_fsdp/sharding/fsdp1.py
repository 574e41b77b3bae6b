"""Sharding with FullyShardedDataParallel (FSDP1).

FSDP1 flattens the parameters of a layer and shards the flat tensor. It exists for results and
checkpoints of systems built on it; FSDP2 is faster and needs less memory.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _catch_all_reshard
from torch.distributed.fsdp._traversal_utils import _get_fsdp_states
from torch.distributed.fsdp.wrap import CustomPolicy

from temper_engine_api.distributed.process_group import gather_objects
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.packed_model import PREFIX, PackedModel, find_layers
from temper_engine_fsdp.runtime.numerics import torch_dtype
from temper_engine_fsdp.sharding.sharded_parameter import FSDP1Parameter, ShardedParameters

_WRAPPER = "_fsdp_wrapped_module."


class _EmptyRoot(nn.Module):
    """A root module without parameters.

    FSDP1 keeps the parameters of its root gathered after a forward pass; this root has none.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Any:
        return self.inner(*inputs)


class FSDP1Module:
    """See ShardedModule. Each decoder layer is one FSDP unit, everything else another."""

    def __init__(
        self, model: PackedModel, *, config: FSDPConfig, mesh: DeviceMesh, host_mesh: DeviceMesh
    ) -> None:
        shapes = {
            name.removeprefix(PREFIX): parameter.shape
            for name, parameter in model.named_parameters()
        }
        layers = set(find_layers(model.hf, names=config.wrap_modules))
        wrap = _make_wrapper(config, mesh=mesh)
        # Only NO_SHARD needs this, see _restore_frozen.
        self._frozen = _frozen_parameters(model) if mesh.size(mesh.ndim - 1) == 1 else []
        self._root = wrap(
            _EmptyRoot(wrap(model, CustomPolicy(lambda module: module in layers))), None
        )
        self.root: nn.Module = self._root
        # FSDP1 accumulates local gradients in the compute dtype, where sums over many micro-batches
        # lose digits; torch 2.13 also fails to restore them for tied parameters. So with a 16-bit
        # compute dtype every micro-batch reduces, in the reduce dtype.
        self._always_reduces = config.precision.compute != config.precision.parameters
        # FSDP1 averages gradients across all ranks, but our loss denominator already counts the
        # full mini-batch. Scaling the loss turns the average into a sum.
        self.loss_factor = float(mesh.size())
        self.eval_needs_gradients = True
        parameters = {
            _remove_wrapper_names(name): parameter
            for name, parameter in self._root.named_parameters()
        }
        shard_sizes = _gather_shard_sizes(parameters, mesh=mesh)
        self.parameters: ShardedParameters = {
            name: FSDP1Parameter(
                name,
                parameter,
                shape=shapes[name],
                mesh=mesh,
                host_mesh=host_mesh,
                shard_sizes=shard_sizes[name],
            )
            for name, parameter in parameters.items()
        }

    @contextmanager
    def micro_batch(self, *, reduces: bool, is_last: bool) -> Iterator[None]:
        """See ShardedModule."""
        try:
            with nullcontext() if reduces or self._always_reduces else self._root.no_sync():
                yield
        finally:
            self._restore_frozen()

    def _restore_frozen(self) -> None:
        """Register frozen parameters again that a backward pass replaced with plain tensors.

        FSDP1 does so itself only when gradients arrive. With NO_SHARD, the next forward pass would
        take the tensors for new parameters and fail.
        """
        for module, name, parameter in self._frozen:
            if getattr(module, name) is not parameter:
                delattr(module, name)
                module.register_parameter(name, parameter)

    def reshard(self) -> None:
        """See ShardedModule. No-op: all modules except the empty root reshard after each pass."""

    def prefetch_parameters(self) -> None:
        """See ShardedModule. No-op: FSDP1 always reshards."""

    def reset(self) -> None:
        """See ShardedModule."""
        # FSDP1 does this at the end of a backward pass, which the exception left out.
        for state in _get_fsdp_states(self._root):
            # A unit that is still gathered would not follow weights that are loaded now.
            _catch_all_reshard(state)
            state.training_state = TrainingState.IDLE
            handle = state._handle
            if handle is None:
                continue
            if not handle.uses_sharded_strategy:
                # With NO_SHARD there is nothing to reshard, so the line above left the plain
                # tensors that a backward pass puts in the place of parameters.
                handle._use_unsharded_views(as_params=True)
            handle._training_state = HandleTrainingState.IDLE
            handle._prefetched = False
            flat = handle.flat_param
            if hasattr(flat, "_post_backward_hook_state"):
                # With a 16-bit compute dtype the hook belongs to the failed forward pass only, and
                # FSDP1 adds no other one while this exists: gradients would stay unreduced.
                flat._post_backward_hook_state[-1].remove()
                del flat._post_backward_hook_state

    def discard_gradients(self) -> None:
        """See ShardedModule."""
        for state in _get_fsdp_states(self._root):
            if state._handle is None:
                continue
            flat: Any = state._handle.flat_param
            flat.grad = None
            flat._post_backward_called = False
            # The reduced gradient of a backward pass that did not end. The next would add to it.
            if hasattr(flat, "_saved_grad_shard"):
                del flat._saved_grad_shard


def _frozen_parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return each frozen parameter with every module that has it, and its name there."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if not parameter.requires_grad
    ]


def _make_wrapper(
    config: FSDPConfig, *, mesh: DeviceMesh
) -> Callable[[nn.Module, CustomPolicy | None], FullyShardedDataParallel]:
    precision = config.precision
    mixed_precision = MixedPrecision(
        param_dtype=torch_dtype(precision.compute),
        reduce_dtype=torch_dtype(precision.reduce),
        # Temperatures and rotary tables must stay float32.
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )
    num_shards = mesh.size(mesh.ndim - 1)
    is_replicated = num_shards == 1
    device = (
        torch.device("cpu")
        if mesh.device_type == "cpu"
        else torch.device(mesh.device_type, torch.cuda.current_device())
    )

    def wrap(module: nn.Module, policy: CustomPolicy | None) -> FullyShardedDataParallel:
        with warnings.catch_warnings():
            # torch deprecates NO_SHARD, but FSDP1 has no other way to replicate across all ranks.
            warnings.simplefilter("ignore", FutureWarning)
            return FullyShardedDataParallel(
                module,
                device_mesh=None if is_replicated else mesh,
                sharding_strategy=_strategy(mesh),
                auto_wrap_policy=policy,
                mixed_precision=mixed_precision,
                device_id=device,
                forward_prefetch=config.forward_prefetch > 0,
                # Keeps parameters separate, so that some can be frozen for LoRA.
                use_orig_params=True,
            )

    return wrap


def _strategy(mesh: DeviceMesh) -> ShardingStrategy:
    if mesh.size(mesh.ndim - 1) == 1:
        # With a mesh, NO_SHARD would reduce over its single shard; without one it reduces across
        # all ranks.
        return ShardingStrategy.NO_SHARD
    return ShardingStrategy.FULL_SHARD if mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD


def _remove_wrapper_names(name: str) -> str:
    return name.replace(_WRAPPER, "").removeprefix("inner.").removeprefix(PREFIX)


def _gather_shard_sizes(
    parameters: dict[str, nn.Parameter], *, mesh: DeviceMesh
) -> dict[str, tuple[int, ...]]:
    """Return how many entries of each parameter every rank holds. Collective."""
    local_sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    group = mesh.get_group(mesh.ndim - 1)
    sizes_by_rank = [local_sizes]
    if group.size() > 1:
        sizes_by_rank = gather_objects(local_sizes, group=group)
    return {name: tuple(sizes[name] for sizes in sizes_by_rank) for name in local_sizes}
