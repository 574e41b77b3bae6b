"""The engine's part of a checkpoint: torch DCP for tensors, one file per rank for RNG states.

DCP saves full logical tensors sharded by rows, so any world size and strategy can load them. RNG
states belong to ranks: a rank without a saved state keeps its current one.

`write_checkpoint` saves the live state. `stage_checkpoint` first copies it to host memory, so that
a thread can write the copy while training continues. On CUDA the copies run on a separate stream
into pinned memory, and later kernels wait for them.
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

from temper_engine_api.checkpoint.saved_state import SafeDcpReader
from temper_engine_api.errors import CheckpointError
from temper_engine_api.weights import NamedWeight, WeightEntry, check_saved_entries
from temper_engine_fsdp.checkpoint import huggingface_files
from temper_engine_fsdp.checkpoint.weight_export import list_weight_entries
from temper_engine_fsdp.components import EngineComponents
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.sharding.sharded_parameter import Buffers, ShardedParameters
from temper_engine_fsdp.training.sharded_optimizer import ShardedOptimizer, StateTensor

STATE_FOLDER = "dcp"
"""Folder with the DCP files, relative to the engine's part of a checkpoint."""
RNG_FOLDER = "random"
"""Folder of the RNG states, one file per rank."""

StateTensors = Mapping[str, StateTensor]
"""Contents of a checkpoint, by kind and Hugging Face name."""


def collect_state_tensors(
    parameters: ShardedParameters, buffers: Buffers, optimizer: ShardedOptimizer | None
) -> dict[str, StateTensor]:
    """Return the engine's tensors, to be saved, or to be overwritten in place when loading."""
    state_tensors = {
        f"parameter.{name}": StateTensor(owner=p, tensor=p.local_shard())
        for name, p in parameters.items()
    }
    state_tensors |= {
        f"buffer.{name}": StateTensor(owner=None, tensor=buffer) for name, buffer in buffers.items()
    }
    return state_tensors | ({} if optimizer is None else optimizer.state_tensors())


def to_row_dtensors(state_tensors: StateTensors) -> dict[str, Tensor]:
    """Convert to tensors sharded by rows, as DCP expects. Collective."""
    return {
        name: state.tensor if state.owner is None else state.owner.to_row_dtensor(state.tensor)
        for name, state in state_tensors.items()
    }


def write_dcp(
    tensors: Mapping[str, Tensor], *, directory: str, rank: int, group: ProcessGroup | None = None
) -> list[str]:
    """Write tensors with DCP. Collective over the group, or over all ranks.

    Returns:
        Relative paths of this rank's files.

    Raises:
        CheckpointError: If a rank could not write; includes the message of torch.
    """
    folder = Path(directory, STATE_FOLDER)
    try:
        save(dict(tensors), storage_writer=FileSystemWriter(folder), process_group=group)
    except (
        CheckpointException,
        RuntimeError,
        OSError,
    ) as error:  # a full disk raises any of these
        raise CheckpointError(
            f"could not write the checkpoint to {folder} ({str(error).strip().splitlines()[-1]}): "
            "free disk space, or save to a folder that this process may write."
        ) from error
    # DCP names the files of a rank __RANK_NUMBER.distcp; the coordinator writes the metadata.
    own_files = sorted(path.name for path in folder.glob(f"__{rank}_*"))
    return [
        f"{STATE_FOLDER}/{name}" for name in (*own_files, *([".metadata"] if rank == 0 else []))
    ]


def read_dcp_weights(entries: Sequence[WeightEntry], *, directory: str) -> Iterator[NamedWeight]:
    """Yield parameters and buffers from DCP files one at a time. No communication."""
    reader = SafeDcpReader(Path(directory, STATE_FOLDER))
    saved = {
        entry.name.partition(".")[2]: entry
        for entry in read_saved_entries(directory)
        if _kind(entry.name) in ("parameter", "buffer")
    }
    for entry in entries:
        tensor = torch.empty(entry.shape, dtype=saved[entry.name].dtype)
        _read_tensor(saved[entry.name].name, tensor, reader)
        yield NamedWeight(entry.name, tensor.to(entry.dtype))


def _read_tensor(name: str, tensor: Tensor, reader: SafeDcpReader) -> None:
    """Read one tensor.

    Uses the steps of DCP directly, because its `load` warns on every call without a process group.
    """
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
    saved: Sequence[WeightEntry],
    directory: str,
) -> None:
    """Fill parameters, buffers and optimizer states from a checkpoint of any layout. Collective.

    Optimizer states are ignored without an optimizer; all other names and shapes must match.
    `saved` are the tensors of `read_saved_entries`.

    Raises:
        CheckpointError: If another configuration made the checkpoint; nothing is loaded then.
    """
    if optimizer is not None:
        optimizer.allocate_state([entry.name for entry in saved])
    state_tensors = collect_state_tensors(parameters, buffers, optimizer)
    expected = [
        WeightEntry(name=name, shape=_get_full_shape(state), dtype=state.tensor.dtype)
        for name, state in state_tensors.items()
    ]
    # An engine without an optimizer may leave its states unread, but not parameters or buffers.
    kinds = {"parameter", "buffer"} | {_kind(name) for name in state_tensors}
    # DCP ignores extra tensors in the files: a shallower model would load the first layers of a
    # deeper one.
    check_saved_entries(
        expected, [entry for entry in saved if _kind(entry.name) in kinds], directory=directory
    )
    tensors = to_row_dtensors(state_tensors)
    load(dict(tensors), storage_reader=SafeDcpReader(Path(directory, STATE_FOLDER)))
    for name, state in state_tensors.items():
        rows = tensors[name]
        if state.owner is not None and isinstance(rows, DTensor):
            loaded = state.owner.from_row_dtensor(rows)
            # Shards of FSDP2 are rows already, so DCP has read into them in place.
            if loaded.data_ptr() != state.tensor.data_ptr():
                state.tensor.copy_(loaded)


def has_any_parameter(saved: Sequence[WeightEntry], parameters: Collection[str]) -> bool:
    """Return True if a checkpoint contains any of these parameters."""
    return not {f"parameter.{name}" for name in parameters}.isdisjoint(
        entry.name for entry in saved
    )


def _get_full_shape(state: StateTensor) -> tuple[int, ...]:
    return tuple(state.tensor.shape if state.owner is None else state.owner.shape)


def read_saved_entries(directory: str) -> list[WeightEntry]:
    """Return names, shapes and dtypes of the tensors in a checkpoint's training state.

    Raises:
        CheckpointError: If the list of tensors is damaged.
        OSError: If it cannot be read.
    """
    reader = SafeDcpReader(Path(directory, STATE_FOLDER))
    return [
        WeightEntry(name=name, shape=tuple(tensor.size), dtype=tensor.properties.dtype)
        for name, tensor in reader.read_metadata().state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    ]


def _kind(name: str) -> str:
    return name.partition(".")[0]


def get_rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return torch's current RNG states of this rank by device type."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def write_rng_states(states: Mapping[str, Tensor], *, directory: str, rank: int) -> str:
    """Write the RNG states; return the relative path.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    relative = f"{RNG_FOLDER}/rank_{rank}.pt"
    path = Path(directory, relative)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(states), path)
    except (RuntimeError, OSError) as error:  # torch raises RuntimeError on a full disk
        raise CheckpointError(
            f"could not write {path} ({str(error).strip().splitlines()[0]}): free disk space, or "
            "save to a folder that this process may write."
        ) from error
    return relative


def load_rng_state(*, directory: str, rank: int, device: torch.device) -> bool:
    """Restore this rank's RNG states; return False if the checkpoint has none."""
    path = Path(directory, RNG_FOLDER, f"rank_{rank}.pt")
    if not path.exists():
        return False
    # weights_only: a checkpoint may come from others and must not run code.
    states: dict[str, Tensor] = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    return True


AdapterContent = tuple[Mapping[str, object], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckpointContent:
    """Contents of a checkpoint that one rank saves."""

    tensors: Mapping[str, Tensor]
    """Parameters, buffers and optimizer states, sharded by rows."""
    rng_states: Mapping[str, Tensor]
    adapter: AdapterContent | None
    """Contents of PEFT's two files; None without an adapter."""


def select_parameters(components: EngineComponents) -> ShardedParameters:
    """Return the parameters to save: the adapter alone, unless its base weights were replaced."""
    adapter = components.adapter
    if adapter is not None and not adapter.has_replaced_base:
        return components.trainable
    return {**components.parameters, **components.trainable}


def write_checkpoint(
    components: EngineComponents,
    *,
    config: FSDPConfig,
    directory: str,
    weights: Iterator[NamedWeight],
) -> list[str]:
    """Write the live state. Collective.

    Args:
        components: Components of the engine.
        config: Engine config.
        directory: Directory for the engine's part of the checkpoint.
        weights: Full tensors for safetensors; consumed only if those are configured.

    Returns:
        Relative paths of this rank's files.
    """
    state_tensors = collect_state_tensors(
        select_parameters(components), components.buffers, components.optimizer
    )
    content = _collect_content(components, to_row_dtensors(state_tensors))
    return _write_content(
        content, components, config=config, directory=directory, group=None, weights=lambda: weights
    )


def _collect_content(
    components: EngineComponents, tensors: Mapping[str, Tensor]
) -> _CheckpointContent:
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
    """Copy the state to host memory. Collective.

    Args:
        components: Components of the engine.
        config: Engine config.
        group: Process group of the background threads.
        weights: Full tensors; consumed only to save safetensors for a merged adapter, the only case
            where a full model is copied.

    Returns:
        A function that writes the copy to a directory and returns the relative paths. Collective
        among the background threads.
    """
    state_tensors = collect_state_tensors(
        select_parameters(components), components.buffers, components.optimizer
    )
    # Copy first: rows may share memory with the tensors that they are converted from.
    copies, wait = copy_to_host(state_tensors, device=components.membership.device)
    if config.strategy == "fsdp1":
        wait()  # converting to rows reads the copies
    content = _collect_content(components, to_row_dtensors(copies))
    merged: list[NamedWeight] = []
    if components.adapter is not None and config.save_huggingface_weights:
        merged = [
            NamedWeight(name, tensor.cpu())
            for name, tensor in weights
            if components.membership.rank == 0
        ]

    def write(directory: str) -> list[str]:
        wait()
        # Gathering would use process groups that training needs; the DCP files have full tensors.
        saved = (
            iter(merged)
            if components.adapter is not None
            else read_dcp_weights(_export_entries(components), directory=directory)
        )
        return _write_content(
            content,
            components,
            config=config,
            directory=directory,
            group=group,
            weights=lambda: saved,
        )

    return write


def _write_content(
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
    # All ranks gather a live model; only rank 0 exports a copy, from the DCP files. Files that a
    # rank writes alone come last, so that a failure there leaves no other rank waiting.
    if config.save_huggingface_weights and (rank == 0 or group is None):
        files += huggingface_files.write_weights(
            weights(),
            _export_entries(components),
            directory=directory,
            is_writer=rank == 0,
            shard_bytes=config.huggingface_shard_bytes,
        )
    files.append(write_rng_states(content.rng_states, directory=directory, rank=rank))
    if rank == 0:
        files += huggingface_files.write_model_config(
            components.hf_config,
            directory=directory,
            source=config.model.path,
            dtype=components.compute_dtype,
        )
    if rank == 0 and content.adapter is not None:
        files += huggingface_files.write_adapter(*content.adapter, directory=directory)
    return files


def _export_entries(components: EngineComponents) -> list[WeightEntry]:
    return list_weight_entries(
        components.parameters,
        components.buffers,
        dtype=components.compute_dtype,
        file_names=components.file_names,
    )


def copy_to_host(
    state_tensors: StateTensors, *, device: torch.device
) -> tuple[dict[str, StateTensor], Callable[[], None]]:
    """Copy state tensors to host memory; also return a function that waits for the copies."""
    if device.type != "cuda":
        return {
            name: StateTensor(owner=state.owner, tensor=state.tensor.clone())
            for name, state in state_tensors.items()
        }, lambda: None
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    # The copies start after the kernels launched so far, such as the optimizer step.
    side.wait_stream(current)
    with torch.cuda.stream(side):
        copies = {
            name: StateTensor(owner=state.owner, tensor=_pinned_copy(state.tensor))
            for name, state in state_tensors.items()
        }
    # The next update must not change a tensor that is still being copied.
    current.wait_stream(side)
    done = torch.cuda.Event()
    done.record(side)
    return copies, done.synchronize


def _pinned_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)
