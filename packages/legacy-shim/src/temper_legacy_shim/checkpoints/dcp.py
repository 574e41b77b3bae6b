"""Writing the engine's checkpoint format (torch's distributed one) from lazy tensors, one in memory at a time, without a process group."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from temper_legacy_shim.checkpoints.lazy import LazyTensor, num_bytes
from temper_legacy_shim.checkpoints.safetensors_files import Progress
from temper_legacy_shim.checkpoints.torch_tensors import as_torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFolder:
    """What was written."""

    files: tuple[str, ...]
    """Their names."""
    with_nan: tuple[str, ...]
    """Tensors that hold NaN."""


def write_folder(folder: Path, tensors: Mapping[str, LazyTensor], *, progress: Progress) -> WrittenFolder:
    """Write a folder.

    Args:
        folder: to be made.
        tensors: by name.
        progress: told of every tensor.

    Raises:
        DamagedFileError: a source file is shorter than it says.
        OSError: the disk is full.
    """
    shells = {name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype.name), device="meta") for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        # torch tells everyone without a process group that they have none.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = _LazyPlanner(tensors, progress=progress)
        try:
            save(shells, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
        except CheckpointException as error:
            # torch wraps what stopped it, and its archive writer wraps that of the disk once more.
            raise next((_root(failure) for failure, _ in error.failures.values()), error) from None
    return WrittenFolder(files=tuple(sorted(path.name for path in folder.iterdir())), with_nan=tuple(planner.with_nan))


def _root(error: BaseException) -> BaseException:
    """What an exception was raised for first."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors that have no content, and reads each one when it is its turn to be written."""

    def __init__(self, tensors: Mapping[str, LazyTensor], *, progress: Progress) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors
        self._progress = progress
        self.with_nan: list[str] = []

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The content of one tensor."""
        tensor = self._tensors[write_item.index.fqn]
        self._progress(num_bytes(tensor))
        content = as_torch(tensor)
        if bool(content.isnan().any()):
            self.with_nan.append(write_item.index.fqn)
        return content
