"""FlashAttention 4 with the results that torch 2.11 expects: later betas return some more."""

from importlib import import_module

from torch import Tensor

_INTERFACE = import_module("flash_attn.cute.interface")


def _flash_attn_fwd(*inputs: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    output, logsumexp, *_ = _INTERFACE._flash_attn_fwd(*inputs, **options)
    return output, logsumexp


def _flash_attn_bwd(*inputs: Tensor, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, *_ = _INTERFACE._flash_attn_bwd(*inputs, **options)
    return query, key, value
