"""Dtypes by the names that configurations use."""

import torch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def dtype_named(name: str) -> torch.dtype:
    """Of bf16, fp16 or fp32."""
    return _DTYPES[name]
