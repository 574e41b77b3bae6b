"""Adapt FlashAttention 4 to torch 2.11, which unpacks fewer results than later betas return."""

from importlib import import_module

from torch import Tensor

_INTERFACE = import_module("flash_attn.cute.interface")


def _flash_attn_fwd(*inputs: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    output, logsumexp, *_ = _INTERFACE._flash_attn_fwd(*inputs, **_causal(options))
    return output, logsumexp


def _flash_attn_bwd(*inputs: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, *_ = _INTERFACE._flash_attn_bwd(*inputs, **_causal(options))
    return query, key, value


def _causal(options: dict[str, object]) -> dict[str, object]:
    """Replace a window that describes causal attention by the option `causal`."""
    if options.get("window_size_left") in (None, -1) and options.get("window_size_right") == 0:
        return {**options, "causal": True, "window_size_left": None, "window_size_right": None}
    return options
