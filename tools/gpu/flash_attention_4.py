"""FlashAttention 4 with the results that torch 2.11 expects: later betas return some more."""

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
    """Name causal attention as such where it is described as a window."""
    if options.get("window_size_left") in (None, -1) and options.get("window_size_right") == 0:
        return {**options, "causal": True, "window_size_left": None, "window_size_right": None}
    return options
