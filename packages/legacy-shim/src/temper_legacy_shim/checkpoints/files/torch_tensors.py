"""Lazy tensors as torch's."""

import torch
from torch import Tensor

from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, read_all


def as_torch(tensor: LazyTensor) -> Tensor:
    """Load a full tensor to new memory, without a cast."""
    block = read_all(tensor)
    dtype: torch.dtype = getattr(torch, tensor.dtype.name)
    # Elements that numpy has no type for travel as unsigned integers of the same width.
    result = torch.from_numpy(block.copy() if not block.flags.writeable else block)
    return result.view(dtype) if result.dtype != dtype else result
