"""Writing the engine's checkpoint format (torch's distributed one) from lazy tensors, one in memory at a time, without a process group."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from temper_legacy_shim.checkpoints.lazy import LazyTensor, num_bytes
from temper_legacy_shim.checkpoints.safetensors_files import Progress
from temper_legacy_shim.checkpoints.torch_tensors import as_torch


def write_folder(folder: Path, tensors: Mapping[str, LazyTensor], *, progress: Progress) -> list[str]:
    """Write a folder; names of its files.

    Args:
        folder: to be made.
        tensors: by name.
        progress: told of every tensor.
    """
    shells = {name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype.name), device="meta") for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        # torch tells everyone without a process group that they have none.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(shells, storage_writer=FileSystemWriter(folder), planner=_LazyPlanner(tensors, progress=progress), no_dist=True)
    return sorted(path.name for path in folder.iterdir())


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors that have no content, and reads each one when it is its turn to be written."""

    def __init__(self, tensors: Mapping[str, LazyTensor], *, progress: Progress) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The content of one tensor."""
        tensor = self._tensors[write_item.index.fqn]
        self._progress(num_bytes(tensor))
        return as_torch(tensor)
