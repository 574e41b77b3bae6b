"""Attention over sequences laid end to end, registered with transformers so that every model of its interface gets it.

No mask over the pack is ever made: its layout is computed once per micro-batch and travels through the model's keyword arguments.
"""

import inspect

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_fsdp.config import AttentionKernel
from temper_engine_fsdp.packing import PackLayout, collect, spread
from temper_engine_fsdp.sequence_parallel import across_ranks

SDPA_VARLEN = "temper_sdpa_varlen"
TORCH_VARLEN = "temper_torch_varlen"

_NEEDS_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 takes grouped heads without a flag; later versions ask for one."""

CHANGES_NOTHING = frozenset(
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
"""Arguments that models hand on to their attention, and no kernel of transformers reads."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a loop over buckets, whose number differs from pack to pack
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
    **others: object,
) -> tuple[Tensor, None]:
    """The attention signature of transformers: query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""
    _refuse(module, attention_mask, softcap=softcap, **others)
    given = value.dtype
    # Packed rows first: [T, H, D].
    query, key, value = (x[0].transpose(0, 1).to(_computed_in(value)) for x in (query, key, value))
    columns = spread(query, key, value, packing)
    sizes = [bucket.num_rows for bucket in packing.buckets]
    parts = []
    for bucket, *qkv in zip(packing.buckets, *(x.split(sizes) for x in columns), strict=True):
        q, k, v = (x.reshape(bucket.num_sequences, bucket.length, *x.shape[1:]).transpose(1, 2) for x in qkv)
        band = packing.band(bucket.length, window=sliding_window)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=band,
            is_causal=band is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))  # values may be narrower than queries
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return collect(rows, packing)[None].to(given), None


def _computed_in(value: Tensor) -> torch.dtype:
    # torch's attention takes a CPU two to three times as long in bf16 as in float32: its products of small blocks are not made for it.
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
    **others: object,
) -> tuple[Tensor, None]:
    """The same on torch's variable-length flash attention (CUDA, bf16 or fp16)."""
    _refuse(module, attention_mask, softcap=softcap, **others)
    if dropout:
        raise ConfigError(f"attention torch_varlen has no dropout, but the model asks for {dropout}: use sdpa_varlen.")
    # Rotary embeddings may leave query and key in float32; the kernel wants the compute dtype.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    starts, longest = packing.starts, packing.max_length
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and _NEEDS_FLAG:
        attended = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=window, enable_gqa=True)
    else:
        attended = varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=window)
    assert isinstance(attended, Tensor)
    return attended[None], None


def _refuse(module: torch.nn.Module, attention_mask: Tensor | None, **options: object) -> None:
    """Whatever a model asks of its attention beyond what the kernels compute: an attention sink, say, or a choice of keys."""
    if options.pop("is_causal", True) is False or vars(module).get("is_causal") is False:
        raise CapabilityError(f"{type(module).__name__} lets tokens see later ones, but packed attention is causal: choose another model.")
    asked = [name for name, value in options.items() if name not in CHANGES_NOTHING and value is not None and value is not False]
    if attention_mask is not None:
        asked.insert(0, "a mask of its own")
    if asked:
        raise CapabilityError(
            f"{type(module).__name__} asks its attention for {', '.join(asked)}, which packed attention does not compute: choose a model "
            "of plain causal attention, with or without a sliding window."
        )


def choose_kernel(wanted: AttentionKernel, *, device: torch.device, compute: str) -> str:
    """The registered name of the kernel to use.

    Raises:
        ConfigError: the kernel wanted cannot run there.
    """
    if wanted == "torch_varlen" and device.type != "cuda":
        raise ConfigError("attention torch_varlen needs CUDA, but this engine runs on the CPU: use auto or sdpa_varlen.")
    if wanted == "torch_varlen" or (wanted == "auto" and device.type == "cuda" and compute != "fp32"):
        return TORCH_VARLEN
    return SDPA_VARLEN


def register() -> None:
    """Make both kernels known to transformers; calling it again changes nothing.

    No mask function goes with them: then transformers makes no mask, and does not look for sequences in the position ids either, which
    on CUDA would make the host wait for the device once in every pass.
    """
    for name, forward in ((SDPA_VARLEN, sdpa_varlen_forward), (TORCH_VARLEN, torch_varlen_forward)):
        AttentionInterface.register(name, across_ranks(forward))
