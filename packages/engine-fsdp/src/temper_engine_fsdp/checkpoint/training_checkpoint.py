"""The engine's part of a checkpoint: torch DCP for parameters and optimiser states, and each rank's random-number state.

DCP holds full logical tensors in pieces, cut by rows, so another world size or another strategy reads what it needs. Random-number
states belong to ranks: a rank that finds none of its own (another world size) goes on with the stream it has.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from temper_engine_api.checkpoint.state_reader import StateReader
from temper_engine_api.errors import CheckpointError
from temper_engine_api.weights import NamedWeight, WeightEntry, check_saved
from temper_engine_fsdp.checkpoint import huggingface_files
from temper_engine_fsdp.checkpoint.weight_export import list_weight_entries
from temper_engine_fsdp.components import EngineComponents
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.runtime.numerics import torch_dtype
from temper_engine_fsdp.sharding.sharded_parameter import Buffers, ShardedParameters
from temper_engine_fsdp.training.sharded_optimizer import ShardedOptimizer, StateTensor

STATE_FOLDER = "dcp"
RNG_FOLDER = "random"

StateTensors = Mapping[str, StateTensor]
"""What a checkpoint holds, by kind and Hugging Face name."""


def collect_state_tensors(
    parameters: ShardedParameters, buffers: Buffers, optimizer: ShardedOptimizer | None
) -> dict[str, StateTensor]:
    """What is saved, and filled in place by loading; the tensors share the engine's memory."""
    state_tensors = {
        f"parameter.{name}": StateTensor(owner=p, tensor=p.local_shard())
        for name, p in parameters.items()
    }
    state_tensors |= {
        f"buffer.{name}": StateTensor(owner=None, tensor=buffer) for name, buffer in buffers.items()
    }
    return state_tensors | ({} if optimizer is None else optimizer.state_tensors())


def to_row_dtensors(state_tensors: StateTensors) -> dict[str, Tensor]:
    """What DCP takes: every piece cut by rows. Collective."""
    return {
        name: piece.tensor if piece.owner is None else piece.owner.to_row_dtensor(piece.tensor)
        for name, piece in state_tensors.items()
    }


def write_dcp(
    tensors: Mapping[str, Tensor], *, directory: str, rank: int, group: ProcessGroup | None = None
) -> list[str]:
    """Write with DCP; relative paths of the files that this rank wrote. Collective over the group, or over all ranks.

    Raises:
        CheckpointError: a rank could not write; says what torch said.
    """
    folder = Path(directory, STATE_FOLDER)
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder), process_group=group)
    except (
        CheckpointException,
        RuntimeError,
        OSError,
    ) as error:  # torch wraps a full disk in any of the three
        raise CheckpointError(
            f"torch could not write to {folder} ({str(error).strip().splitlines()[-1]})"
        ) from error
    own_files = sorted(path.name for path in folder.glob(f"__{rank}_*"))
    return [
        f"{STATE_FOLDER}/{name}" for name in (*own_files, *([".metadata"] if rank == 0 else []))
    ]


def read_dcp_weights(entries: Sequence[WeightEntry], *, directory: str) -> Iterator[NamedWeight]:
    """Parameters and buffers from what ``write_tensors`` wrote, one at a time, in the dtypes of the entries. No communication."""
    reader = StateReader(Path(directory, STATE_FOLDER))
    saved = {
        entry.name.partition(".")[2]: entry
        for entry in _saved_entries(reader)
        if _kind(entry.name) in ("parameter", "buffer")
    }
    for entry in entries:
        tensor = torch.empty(entry.shape, dtype=saved[entry.name].dtype)
        _read_tensor(saved[entry.name].name, tensor, reader)
        yield NamedWeight(entry.name, tensor.to(entry.dtype))


def _read_tensor(name: str, tensor: Tensor, reader: StateReader) -> None:
    """Fill a tensor by DCP's own steps: its ``load`` warns on every call where it is to leave the other ranks out."""
    planner, metadata = DefaultLoadPlanner(), reader.read_metadata()
    planner.set_up_planner({name: tensor}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


@torch.no_grad()
def load_training_state(
    parameters: ShardedParameters,
    buffers: Buffers,
    optimizer: ShardedOptimizer | None,
    *,
    directory: str,
) -> None:
    """Fill parameters, buffers and optimiser states from what was written at this or another layout. Collective.

    Optimiser states that nobody asks for (optimizer: null) may stay unread; in all else names and shapes agree both ways.

    Raises:
        CheckpointError: another configuration made it; nothing has been read then.
    """
    reader = StateReader(Path(directory, STATE_FOLDER))
    saved = _saved_entries(reader)
    if optimizer is not None:
        optimizer.allocate_state([entry.name for entry in saved])
    state_tensors = collect_state_tensors(parameters, buffers, optimizer)
    expected = [
        WeightEntry(name=name, shape=_shape_of(piece), dtype=piece.tensor.dtype)
        for name, piece in state_tensors.items()
    ]
    kinds = {"parameter", "buffer"} | {_kind(name) for name in state_tensors}
    # DCP reads what is asked and passes over the rest: a deeper model's first layers would load into a shallower one.
    check_saved(
        expected, [entry for entry in saved if _kind(entry.name) in kinds], directory=directory
    )
    tensors = to_row_dtensors(state_tensors)
    load(dict(tensors), storage_reader=reader)
    for name, piece in state_tensors.items():
        rows = tensors[name]
        if piece.owner is not None and isinstance(rows, DTensor):
            loaded = piece.owner.from_row_dtensor(rows)
            if loaded.data_ptr() != piece.tensor.data_ptr():
                piece.tensor.copy_(loaded)


def has_any_parameter(directory: str, parameters: Collection[str]) -> bool:
    """Whether a checkpoint holds any of these parameters."""
    saved = {entry.name for entry in _saved_entries(StateReader(Path(directory, STATE_FOLDER)))}
    return any(f"parameter.{name}" in saved for name in parameters)


def _shape_of(piece: StateTensor) -> tuple[int, ...]:
    return tuple(piece.tensor.shape if piece.owner is None else piece.owner.shape)


def _saved_entries(reader: StateReader) -> list[WeightEntry]:
    saved = reader.read_metadata().state_dict_metadata
    return [
        WeightEntry(name=name, shape=tuple(tensor.size), dtype=tensor.properties.dtype)
        for name, tensor in saved.items()
        if isinstance(tensor, TensorStorageMetadata)
    ]


def _kind(name: str) -> str:
    return name.partition(".")[0]


def get_rng_states(device: torch.device) -> dict[str, Tensor]:
    """Torch's random-number states of this rank, as they are now."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def write_rng_states(states: Mapping[str, Tensor], *, directory: str, rank: int) -> str:
    """Write them; the relative path.

    Raises:
        CheckpointError: the file can't be written.
    """
    relative = f"{RNG_FOLDER}/rank_{rank}.pt"
    path = Path(directory, relative)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(states), path)
    except (RuntimeError, OSError) as error:  # torch makes a RuntimeError of a full disk
        raise CheckpointError(
            f"could not write {path} ({str(error).strip().splitlines()[0]})"
        ) from error
    return relative


def load_rng_state(*, directory: str, rank: int, device: torch.device) -> bool:
    """Restore this rank's random-number state; False where the checkpoint has none for it."""
    path = Path(directory, RNG_FOLDER, f"rank_{rank}.pt")
    if not path.exists():
        return False
    states: dict[str, Tensor] = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    return True


AdapterContent = tuple[Mapping[str, object], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckpointContent:
    """Of one rank."""

    tensors: Mapping[str, Tensor]
    """Parameters, buffers and optimiser states, cut by rows."""
    rng_states: Mapping[str, Tensor]
    """Of this rank."""
    adapter: AdapterContent | None
    """What PEFT's two files hold; None where there is no adapter."""


def write_checkpoint(
    components: EngineComponents,
    *,
    config: FSDPConfig,
    directory: str,
    weights: Iterator[NamedWeight],
) -> list[str]:
    """Write the state as it is; relative paths of this rank's files. Collective.

    Args:
        parts: of the engine.
        config: its configuration.
        directory: of the checkpoint's part.
        weights: full tensors for the safetensors, consumed only where they are asked for.
    """
    state_tensors = collect_state_tensors(
        components.checkpoint_parameters, components.buffers, components.optimizer
    )
    content = _content(components, to_row_dtensors(state_tensors))
    return _write(
        content, components, config=config, directory=directory, group=None, weights=lambda: weights
    )


def _content(components: EngineComponents, tensors: Mapping[str, Tensor]) -> _CheckpointContent:
    adapter = (
        None if components.adapter is None else components.adapter.export(components.trainable)
    )
    return _CheckpointContent(
        tensors=tensors, rng_states=get_rng_states(components.membership.device), adapter=adapter
    )


def stage_checkpoint(
    components: EngineComponents,
    *,
    config: FSDPConfig,
    group: ProcessGroup,
    weights: Iterator[NamedWeight],
) -> Callable[[str], list[str]]:
    """Copy the state to host memory; what writes the copy among threads that meet in this group. Collective.

    Args:
        parts: of the engine.
        config: its configuration.
        group: of the threads.
        weights: full tensors, consumed only where safetensors of a merged adapter are asked for: the one model that is copied whole.
    """
    state_tensors = collect_state_tensors(
        components.checkpoint_parameters, components.buffers, components.optimizer
    )
    copies, wait = copy_to_host(state_tensors, device=components.membership.device)
    if config.strategy == "fsdp1":
        wait()  # cutting by rows reads the copies
    content = _content(components, to_row_dtensors(copies))
    merged: list[NamedWeight] = []
    if components.adapter is not None and config.save_huggingface_weights:
        merged = [
            NamedWeight(name, tensor.cpu())
            for name, tensor in weights
            if components.membership.rank == 0
        ]

    def write(directory: str) -> list[str]:
        wait()
        # Gathering would need the engine's groups; what was just written holds full tensors.
        saved = (
            iter(merged)
            if components.adapter is not None
            else read_dcp_weights(_entries(components, config), directory=directory)
        )
        return _write(
            content,
            components,
            config=config,
            directory=directory,
            group=group,
            weights=lambda: saved,
        )

    return write


def _write(
    content: _CheckpointContent,
    components: EngineComponents,
    *,
    config: FSDPConfig,
    directory: str,
    group: ProcessGroup | None,
    weights: Callable[[], Iterator[NamedWeight]],
) -> list[str]:
    rank = components.membership.rank
    files = write_dcp(content.tensors, directory=directory, rank=rank, group=group)
    # A copy is exported by one rank, from the disk; a live model is gathered, by all of them. What each rank writes alone comes after it:
    # one that fails there leaves no other rank waiting.
    if config.save_huggingface_weights and (rank == 0 or group is None):
        files += huggingface_files.write_weights(
            weights(),
            _entries(components, config),
            directory=directory,
            is_writer=rank == 0,
            shard_bytes=config.huggingface_shard_bytes,
        )
    files.append(write_rng_states(content.rng_states, directory=directory, rank=rank))
    if rank == 0:
        dtype = torch_dtype(config.precision.compute)
        files += huggingface_files.write_model_config(
            components.hf_config, directory=directory, source=config.model.path, dtype=dtype
        )
    if rank == 0 and content.adapter is not None:
        files += huggingface_files.write_adapter(*content.adapter, directory=directory)
    return files


def _entries(components: EngineComponents, config: FSDPConfig) -> list[WeightEntry]:
    return list_weight_entries(
        components.parameters, components.buffers, dtype=torch_dtype(config.precision.compute)
    )


def copy_to_host(
    state_tensors: StateTensors, *, device: torch.device
) -> tuple[dict[str, StateTensor], Callable[[], None]]:
    """The pieces in host memory, and what waits until they are there."""
    if device.type != "cuda":
        return {
            name: StateTensor(owner=piece.owner, tensor=piece.tensor.clone())
            for name, piece in state_tensors.items()
        }, lambda: None
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        copies = {
            name: StateTensor(owner=piece.owner, tensor=_pinned_copy(piece.tensor))
            for name, piece in state_tensors.items()
        }
    current.wait_stream(side)
    done = torch.cuda.Event()
    done.record(side)
    return copies, done.synchronize


def _pinned_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)
