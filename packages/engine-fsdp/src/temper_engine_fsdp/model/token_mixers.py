"""Convolution and state-space layers over packs: each sequence starts with an empty state.

Such a layer (linear attention, Mamba, short convolutions) carries a state along the tokens in a
row. Here each sequence in a pack becomes its own row, padded on the right. That is exact, because
these layers are causal: no real token sees the padding after it, and padding has no gradient. The
layer itself is transformers' own, with the kernels that it selects.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import PretrainedConfig, PreTrainedModel

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_fsdp.model.pack_layout import PackLayout

ATTENTION_TYPES = frozenset(("full_attention", "sliding_attention"))
"""`layer_types` values for layers where tokens only interact in the registered attention."""
MIXER_TYPES = frozenset(("linear_attention", "conv", "mamba", "mamba2", "hybrid"))
"""`layer_types` values for layers with a state, with or without attention."""
TOKENWISE_TYPES = frozenset(("mlp", "moe"))
"""`layer_types` values for layers that process each token by itself."""


def find_token_mixers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules with a convolution over tokens, by name."""
    return {
        name.rpartition(".")[0]: model.get_submodule(name.rpartition(".")[0])
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv1d)
    }


def list_layer_types(config: PretrainedConfig) -> list[str] | None:
    """Return each layer's type; None if the config has none."""
    text = config.get_text_config(decoder=True)
    kinds = read_declared(text, "layer_types") or read_declared(text, "layers_block_type")
    return None if kinds is None else [str(kind) for kind in kinds]


def read_declared(config: PretrainedConfig, name: str) -> Any:
    """Return a field of a config, or None if the model does not read it.

    A config.json can have fields of other models. The config classes of transformers declare those
    that their models read: as attributes, as properties, or in the table `attribute_map` of other
    names. Classes in the code of a model directory may set them without a declaration.
    """
    kind = type(config)
    is_declared = (
        hasattr(kind, name)
        or name in kind.attribute_map
        or name in inspect.signature(kind.__init__).parameters
        or not kind.__module__.startswith("transformers.models.")
    )
    return getattr(config, name, None) if is_declared else None


def count_mixing_layers(config: PretrainedConfig) -> int:
    """Return the number of layers where tokens interact."""
    kinds = list_layer_types(config)
    if kinds is None:
        return int(config.get_text_config(decoder=True).num_hidden_layers)
    return sum(kind not in TOKENWISE_TYPES for kind in kinds)


def separate_sequences(model: PreTrainedModel) -> bool:
    """Make all convolution and state-space layers of a model treat sequences separately.

    Returns:
        True if the model has such layers.

    Raises:
        CapabilityError: If a layer takes other arguments, or one with a state is not found.
    """
    mixers = find_token_mixers(model)
    kinds = list_layer_types(model.config) or []
    num_stateful = sum(kind in MIXER_TYPES for kind in kinds)
    if num_stateful > len(mixers):
        raise CapabilityError(
            f"this {model.config.model_type} model has {num_stateful} layers with a state, but "
            f"only {len(mixers)} with a convolution, by which such layers are found; the others "
            "would mix the sequences of a pack: choose another model."
        )
    for name, mixer in mixers.items():
        _check_arguments(name, mixer, model_type=model.config.model_type)
        # Assign forward instead of wrapping the module, which would add a prefix to every name.
        mixer.forward = _separated(mixer.forward, name=name)
    return bool(mixers)


def check_no_sequence_parallel(model: PreTrainedModel, *, size: int) -> None:
    """Check that no layer needs other ranks' tokens for its state.

    Raises:
        ConfigError: If there are such layers and sequence parallelism is on.
    """
    mixers = find_token_mixers(model)
    if size > 1 and mixers:
        raise ConfigError(
            f"sequence_parallel is {size}, but this {model.config.model_type} model has layers "
            f"with a state over all tokens ({next(iter(mixers))}), which cannot be divided among "
            "ranks: set it to 1."
        )


def _check_arguments(name: str, mixer: nn.Module, *, model_type: str) -> None:
    """Check that a layer can be called with hidden states alone."""
    required = [
        parameter.name
        for parameter in inspect.signature(mixer.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    takes_keywords = any(
        parameter.kind is parameter.VAR_KEYWORD
        for parameter in inspect.signature(mixer.forward).parameters.values()
    )
    if required != ["hidden_states"] or not takes_keywords:
        raise CapabilityError(
            f"this {model_type} model has a convolution over tokens ({name}) in a layer that "
            f"takes {', '.join(required)}{'' if takes_keywords else ' and no layout of the pack'}, "
            "which would mix the sequences of a pack: choose a model whose layers with a state "
            "take hidden_states and keyword arguments."
        )


def _separated(forward: Callable[..., Tensor], *, name: str) -> Callable[..., Tensor]:
    """Wrap the forward of a layer so that it runs on one row per sequence."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # number of buckets varies
    def run_on_rows(
        hidden_states: Tensor, *_: object, packing: PackLayout | None = None, **options: object
    ) -> Tensor:
        if packing is None:
            raise CapabilityError(
                f"the model does not pass its keyword arguments to {name}, but the bounds of "
                "packed sequences are among them: choose a model that passes them."
            )
        if options.get("attention_mask") is not None:
            raise CapabilityError(
                f"the model passes an attention mask to {name}, but each sequence is a row "
                "of its own here, which a mask does not fit: choose another model."
            )
        packing.num_mixer_calls += 1
        rows: Tensor = _ToRows.apply(hidden_states[0], packing)  # type: ignore[no-untyped-call]
        parts = [
            forward(part.unflatten(0, (bucket.num_sequences, bucket.length))).flatten(0, 1)
            for bucket, part in zip(
                packing.buckets,
                rows.split([bucket.num_rows for bucket in packing.buckets]),
                strict=True,
            )
        ]
        mixed = torch.cat(parts) if len(parts) > 1 else parts[0]
        tokens: Tensor = _ToTokens.apply(mixed, packing)  # type: ignore[no-untyped-call]
        return tokens[None]

    separated: Callable[..., Tensor] = run_on_rows
    return separated


# Autograd functions, because the gradient of `index_select` adds rows in an order that differs from
# run to run on CUDA. Here every row has one source.
class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tokens: Tensor, layout: PackLayout) -> Tensor:
        ctx.layout = layout  # type: ignore[attr-defined]
        return tokens.index_select(0, layout.token_index)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        # Padding repeats tokens but has no gradient.
        return grad.index_select(0, ctx.layout.row_index), None  # type: ignore[attr-defined]


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, layout: PackLayout) -> Tensor:
        ctx.layout = layout  # type: ignore[attr-defined]
        return rows.index_select(0, layout.row_index)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        layout: PackLayout = ctx.layout  # type: ignore[attr-defined]
        rows = grad.new_zeros((layout.token_index.shape[0], *grad.shape[1:]))
        return rows.index_copy_(0, layout.row_index, grad), None
