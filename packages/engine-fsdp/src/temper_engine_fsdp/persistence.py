"""The engine's part of a checkpoint: torch DCP for parameters and optimiser states, and each rank's random-number state.

DCP holds full logical tensors in pieces, so another world size reads what it needs. Random-number states belong to ranks: a rank that
finds none of its own (another world size) goes on with the stream it has.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from temper_engine_api.errors import CheckpointError
from temper_engine_api.weights import WeightEntry, check_saved
from temper_engine_fsdp.optimizer import Moments
from temper_engine_fsdp.state import like

STATE_FOLDER = "dcp"
RANDOM_FOLDER = "random"


def training_tensors(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], moments: Mapping[str, Moments]
) -> dict[str, Tensor]:
    """What DCP writes, and fills in place: sharded tensors that share the engine's memory, by kind and Hugging Face name."""
    tensors: dict[str, Tensor] = {f"parameter.{name}": parameter.data for name, parameter in parameters.items()}
    tensors |= {f"buffer.{name}": buffer for name, buffer in buffers.items()}
    for name, kept in moments.items():
        tensors[f"first_moment.{name}"] = like(parameters[name], kept.first)
        tensors[f"second_moment.{name}"] = like(parameters[name], kept.second)
        tensors[f"update_count.{name}"] = kept.count
    return tensors


def write_tensors(tensors: Mapping[str, Tensor], *, directory: str, rank: int) -> list[str]:
    """Write with DCP; relative paths of the files that this rank wrote. Collective.

    Raises:
        CheckpointError: a rank could not write; says what torch said.
    """
    folder = Path(directory, STATE_FOLDER)
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder))
    except (CheckpointException, RuntimeError, OSError) as error:  # torch wraps a full disk in any of the three
        raise CheckpointError(f"torch could not write to {folder} ({str(error).strip().splitlines()[-1]})") from error
    mine = sorted(path.name for path in folder.glob(f"__{rank}_*"))
    return [f"{STATE_FOLDER}/{name}" for name in (*mine, *([".metadata"] if rank == 0 else []))]


def read_tensors(tensors: Mapping[str, Tensor], *, directory: str) -> None:
    """Fill these tensors from what ``write_tensors`` wrote at this or another world size. Collective.

    Optimiser states that nobody asks for (optimizer: null) may stay unread; in all else names and shapes agree both ways.

    Raises:
        CheckpointError: another configuration made it; nothing has been read then.
    """
    reader = FileSystemReader(Path(directory, STATE_FOLDER))
    wanted = [WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in tensors.items()]
    kinds = {"parameter", "buffer"} | {_kind(name) for name in tensors}
    # DCP reads what is asked and passes over the rest: a deeper model's first layers would load into a shallower one.
    check_saved(wanted, [entry for entry in _saved_entries(reader) if _kind(entry.name) in kinds], directory=directory)
    load(dict(tensors), storage_reader=reader)


def _saved_entries(reader: FileSystemReader) -> list[WeightEntry]:
    saved = reader.read_metadata().state_dict_metadata
    return [
        WeightEntry(name=name, shape=tuple(tensor.size), dtype=tensor.properties.dtype)
        for name, tensor in saved.items()
        if isinstance(tensor, TensorStorageMetadata)
    ]


def _kind(name: str) -> str:
    return name.partition(".")[0]


def write_random_state(*, directory: str, rank: int, device: torch.device) -> str:
    """Write torch's random-number state of this rank; its relative path."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    relative = f"{RANDOM_FOLDER}/rank_{rank}.pt"
    path = Path(directory, relative)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(states, path)
    return relative


def read_random_state(*, directory: str, rank: int, device: torch.device) -> bool:
    """Restore this rank's random-number state; False where the checkpoint has none for it."""
    path = Path(directory, RANDOM_FOLDER, f"rank_{rank}.pt")
    if not path.exists():
        return False
    states: dict[str, Tensor] = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    return True
