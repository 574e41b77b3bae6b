"""Attention kernels over packed sequences, registered with transformers.

They never build a mask over the pack: its layout reaches them through the model's keyword
arguments. `torch_varlen` takes sequence bounds, SDPA runs over the layout's padded buckets.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_fsdp.config import AttentionKernel
from temper_engine_fsdp.model.pack_layout import PackLayout, pad_input, unpad_output
from temper_engine_fsdp.model.scored_attention import (
    add_sink_to_mask,
    add_sinks,
    attend_with_softcap,
)

CUDNN_MIN_LENGTH = 2048
"""Shortest bucket that runs on cuDNN rather than on FlashAttention 2.

On an H200 in bf16, cuDNN halves the time for a causal sequence with 16,384 tokens, forward and
backward. Below this length attention is a small part of an update.
"""


# The name lacks "sdpa", because transformers refuses such names for models with sinks.
SDPA_VARLEN = "temper_padded_varlen"
TORCH_VARLEN = "temper_torch_varlen"

_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True if varlen_attn needs a flag for grouped heads, as it does after torch 2.11."""

IGNORED_ARGUMENTS = frozenset(
    (
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "use_cache",
    )
)
"""Arguments that models pass to their attention and that no kernel of transformers reads."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # number of buckets varies
def sdpa_varlen_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: PackLayout,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute causal attention with SDPA, one call per bucket.

    Args:
        module: Attention module.
        query: [1, H, T, D].
        key: [1, K, T, D], K key-value heads.
        value: [1, K, T, D'], possibly narrower than the queries.
        attention_mask: Must be None.
        scaling: Factor of the attention scores.
        packing: Layout of the pack.
        dropout: Dropout probability.
        sliding_window: Number of positions each token attends to; None means all.
        softcap: Limit of the attention scores; None means none.
        s_aux: [H] logits of attention sinks; None means none.
        **options: The model's other arguments; refused if they would change the result.

    Returns:
        [1, T, H, D'] and None, as transformers expects.

    Raises:
        CapabilityError: If the model needs another kind of attention.
    """
    if softcap is not None and s_aux is not None:
        options["s_aux"] = s_aux  # no known model has both
    _refuse(module, attention_mask, **options)
    input_dtype = value.dtype
    # To [T, H, D].
    query, key, value = (
        x[0].transpose(0, 1).to(_compute_dtype(value)) for x in (query, key, value)
    )
    columns = pad_input(query, key, value, packing)
    sizes = [bucket.num_rows for bucket in packing.buckets]
    parts = []
    for bucket, *qkv in zip(packing.buckets, *(x.split(sizes) for x in columns), strict=True):
        q, k, v = (
            x.reshape(bucket.num_sequences, bucket.length, *x.shape[1:]).transpose(1, 2)
            for x in qkv
        )
        if softcap is None:
            mask = packing.sliding_window_mask(bucket.length, window=sliding_window)
            out = _attend_with_sdpa(
                q, k, v, mask=mask, dropout=dropout, scaling=scaling, sinks=s_aux
            )
        else:
            out = attend_with_softcap(
                q,
                k,
                v,
                mask=packing.causal_mask(bucket.length, window=sliding_window),
                scaling=scaling,
                softcap=softcap,
                dropout_p=dropout,
            )
        parts.append(out.transpose(1, 2).flatten(0, 1))  # values may be narrower than queries
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return unpad_output(rows, packing)[None].to(input_dtype), None


def _attend_with_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    dropout: float,
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    """Run SDPA on rows [N, H, L, D]; without a mask it is causal."""
    length = query.shape[2]
    if sinks is not None:
        query, key, value = add_sinks(query, key, value, sinks=sinks, scaling=scaling)
        mask = None if mask is None else add_sink_to_mask(mask)
    with _sdpa_backends(query, length=length):
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out if sinks is None else out[:, :, 1:]


def _sdpa_backends(query: Tensor, *, length: int) -> AbstractContextManager[None]:
    """Prefer cuDNN for long buckets on CUDA and FlashAttention 2 for short buckets."""
    if query.device.type != "cuda" or query.dtype == torch.float32:
        return nullcontext()
    preferred = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if length < CUDNN_MIN_LENGTH:
        # Short buckets differ in their number of sequences, and cuDNN would plan for each number.
        preferred.reverse()
    # A backend that does not support the call, such as one with a mask, is skipped.
    others = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    backends: AbstractContextManager[None] = sdpa_kernel([*preferred, *others], set_priority=True)
    return backends


def _compute_dtype(value: Tensor) -> torch.dtype:
    # SDPA on a CPU is two to three times slower in bf16 than in float32 for these small blocks.
    return torch.float32 if value.device.type == "cpu" else value.dtype


def torch_varlen_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: PackLayout,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute causal attention with torch's variable-length flash attention (CUDA, bf16 or fp16).

    Takes the arguments of `sdpa_varlen_forward`, and calls it for layers with sinks or
    soft-capping, for which the kernel has no argument.
    """
    if softcap is not None or s_aux is not None:
        padded: tuple[Tensor, None] = sdpa_varlen_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            packing=packing,
            dropout=dropout,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=s_aux,
            **options,
        )
        return padded
    _refuse(module, attention_mask, **options)
    # `read_attention_dropout` may not know the name that this model's config has for dropout.
    check_dropout("torch_varlen", dropout=dropout)
    # Rotary embeddings may leave query and key in float32; the kernel wants the compute dtype.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
    # (left, right): -1 is unlimited, and 0 to the right makes it causal. transformers' window
    # includes the token itself, the kernel's does not.
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    starts, longest = packing.starts, packing.max_length
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and _HAS_GQA_FLAG:
        attended = varlen_attn(
            q,
            k,
            v,
            starts,
            starts,
            longest,
            longest,
            scale=scaling,
            window_size=window,
            enable_gqa=True,
        )
    else:
        attended = varlen_attn(
            q, k, v, starts, starts, longest, longest, scale=scaling, window_size=window
        )
    assert isinstance(attended, Tensor)
    return attended[None], None


def _refuse(module: torch.nn.Module, attention_mask: Tensor | None, **options: object) -> None:
    """Reject options that the kernels do not support, such as a mask."""
    if options.pop("is_causal", True) is False or vars(module).get("is_causal") is False:
        raise CapabilityError(
            f"{type(module).__name__} attends to later tokens, but packed attention is causal: "
            "choose another model."
        )
    unsupported = [
        name
        for name, value in options.items()
        if name not in IGNORED_ARGUMENTS and value is not None and value is not False
    ]
    if attention_mask is not None:
        unsupported.insert(0, "an attention mask")
    if unsupported:
        raise CapabilityError(
            f"{type(module).__name__} passes {', '.join(unsupported)} to its attention, which "
            "packed attention does not support: choose a model with causal attention, with or "
            "without a sliding window, sinks or soft-capping."
        )


def choose_kernel(
    requested: AttentionKernel, *, device: torch.device, compute: str, dropout: float
) -> str:
    """Return the registered name of the attention kernel.

    Args:
        requested: Kernel of the configuration.
        device: Device of the engine.
        compute: Compute dtype.
        dropout: Dropout probability of the model's attention.

    Raises:
        ConfigError: If the requested kernel cannot run on the device, or has no dropout.
    """
    if requested == "torch_varlen" and device.type != "cuda":
        raise ConfigError(
            "attention torch_varlen needs CUDA, but this engine runs on the CPU: use auto or "
            "sdpa_varlen."
        )
    check_dropout(requested, dropout=dropout)
    if requested == "torch_varlen" or (
        requested == "auto" and device.type == "cuda" and compute != "fp32" and not dropout
    ):
        return TORCH_VARLEN
    return SDPA_VARLEN


def check_dropout(requested: AttentionKernel, *, dropout: float) -> None:
    """Check that the requested kernel can drop attention weights as the model does in training.

    Raises:
        ConfigError: If it cannot.
    """
    if requested == "torch_varlen" and dropout:
        raise ConfigError(
            f"attention torch_varlen has no dropout, but the model sets it to {dropout}: use auto "
            "or sdpa_varlen."
        )


def parallelize_attention(
    forward: Callable[..., tuple[Tensor, None]],
) -> Callable[..., tuple[Tensor, None]]:
    """Wrap an attention kernel over full packs for ranks that hold slices.

    Without a sequence group the kernel is called directly.
    """

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packing: PackLayout | None = None,
        s_aux: Tensor | None = None,
        **options: object,
    ) -> tuple[Tensor, None]:
        if packing is None:
            raise CapabilityError(
                f"{type(module).__name__} does not pass the keyword arguments of the model to its "
                "attention, which carry the bounds of packed sequences: choose a model that does."
            )
        if not torch.compiler.is_compiling():  # the count would become a constant
            # PackedModel checks this after the first pass.
            packing.num_attention_calls += 1
            packing.has_window |= options.get("sliding_window") is not None
            packing.has_softcap |= options.get("softcap") is not None
        if s_aux is not None:
            options["s_aux"] = s_aux
        elif getattr(module, "sinks", None) is not None:
            raise CapabilityError(
                f"{type(module).__name__} has sinks, which it does not pass to its attention: "
                "choose a model that does, such as gpt_oss."
            )
        sequence_group = packing.sequence_group
        if sequence_group is None:
            return forward(module, query, key, value, attention_mask, packing=packing, **options)
        if s_aux is not None:
            options["s_aux"] = sequence_group.take_heads(s_aux)
        # Rotary embeddings may leave query and key in float32: cast first to halve the traffic.
        query, key, value = (
            sequence_group.to_heads(x.to(value.dtype)) for x in (query, key, value)
        )
        attended, _ = forward(module, query, key, value, attention_mask, packing=packing, **options)
        return sequence_group.to_slices(attended), None

    return attend


def register_kernels() -> None:
    """Register both kernels with transformers; idempotent.

    No mask function is registered. transformers then builds no mask and does not search the
    position ids for sequences, which on CUDA would sync the host in every pass.
    """
    for name, forward in ((SDPA_VARLEN, sdpa_varlen_forward), (TORCH_VARLEN, torch_varlen_forward)):
        AttentionInterface.register(name, parallelize_attention(forward))
