"""A copy of the training state in host memory, which a thread can write while training goes on.

On CUDA the copies run on a stream of their own into pinned memory: the host does not wait, and kernels that are launched afterwards
start once the copies are made.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from temper_engine_fsdp.optimizer import Piece
from temper_engine_fsdp.persistence import Pieces


def copy_to_host(pieces: Pieces, *, device: torch.device) -> tuple[dict[str, Piece], Callable[[], None]]:
    """The pieces in host memory, and what waits until they are there."""
    if device.type != "cuda":
        return {name: Piece(owner=piece.owner, tensor=piece.tensor.clone()) for name, piece in pieces.items()}, lambda: None
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        copies = {name: Piece(owner=piece.owner, tensor=_pinned_copy(piece.tensor)) for name, piece in pieces.items()}
    current.wait_stream(side)
    done = torch.cuda.Event()
    done.record(side)
    return copies, done.synchronize


def _pinned_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)
