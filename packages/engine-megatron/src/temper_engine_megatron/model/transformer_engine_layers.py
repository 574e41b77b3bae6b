"""Linear layers of TransformerEngine, with the parameters and names of Megatron's own.

Import this only if TransformerEngine is installed: without it, Megatron-Core's classes are mocks.
"""

from typing import Any

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

from temper_engine_api.errors import CapabilityError
from temper_engine_megatron.bridge_compat import get_mlp_submodules

FLOAT8_MULTIPLE = 16
"""Sizes of a float8 product are multiples of this."""


class ColumnParallelLayer(TEColumnParallelLinear):
    """Linear layer whose outputs are split over tensor-parallel ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _configure(self)


class RowParallelLayer(TERowParallelLinear):
    """Linear layer whose inputs are split over tensor-parallel ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _configure(self)


def _configure(layer: Any) -> None:
    # Let the matmul add gradients of weights to `main_grad`, in float32. Set here because in
    # Megatron's config it would also apply to its own layers, which need Apex for it.
    layer.fuse_wgrad_accumulation = True
    # Without the cache of float8 weights, TransformerEngine does not ask which micro-batch is the
    # first one. It would overwrite `main_grad` there, but an update may consist of several calls.
    layer.disable_parameter_transpose_cache = True
    shape = tuple(layer.weight.shape)
    if layer.config.fp8 and any(size % FLOAT8_MULTIPLE for size in shape):
        raise CapabilityError(
            f"float8 is on, but the model has a weight with {shape[0]} x {shape[1]} numbers on a "
            f"rank, and both sizes must be multiples of {FLOAT8_MULTIPLE}: set float8 to none, or "
            "change tensor_parallel."
        )


def replace_linear_layers(layer_spec: Any, *, in_attention: bool, in_mlp: bool) -> None:
    """Replace the linear layers of a layer spec's attention, of its dense MLP, or of both."""
    if in_attention:
        attention = layer_spec.submodules.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = ColumnParallelLayer, RowParallelLayer
    if in_mlp:
        mlp = get_mlp_submodules(layer_spec)
        mlp.linear_fc1, mlp.linear_fc2 = ColumnParallelLayer, RowParallelLayer
