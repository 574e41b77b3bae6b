"""Files in the engine's part of a checkpoint.

The training state is stored as full tensors under Hugging Face names in safetensors files, so any
layout can load it; each rank writes the tensors assigned to it. Release 0.1 wrote all of them from
one rank, and FSDPEngine writes torch's distributed checkpoint (DCP); both can be read. RNG states
belong to ranks: a rank without a saved state keeps its current one.
"""

import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from temper_engine_api.adapter_checks import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from temper_engine_api.checkpoint.saved_state import (
    BUFFER,
    COUNT,
    DCP_FOLDER,
    FIRST,
    SAFETENSORS_FOLDER,
    SECOND,
    SafeDcpReader,
    SavedState,
    has_dcp_state,
    has_safetensors_state,
    have_moments,
    open_dcp_state,
    open_safetensors_state,
)
from temper_engine_api.errors import CheckpointError, DamagedCheckpointError
from temper_engine_api.file_names import FileNames
from temper_engine_api.weights import NamedWeight, TrainingState
from temper_engine_megatron.huggingface.weight_names import (
    map_to_saved_names,
    split_saved_experts,
)
from temper_engine_megatron.runtime.cpu_device import support_missing_cuda

FILE_BYTES = 2 << 30
"""Approximate size of a training state file."""
RNG_FOLDER, ADAPTER_FOLDER = "random", "adapter"
_MEGATRON_PREFIX = "megatron."
"""Name prefix of Megatron's RNG states."""
FileTensors = dict[str, Tensor]
"""Tensors of one parameter, by name in the file."""


def state_to_tensors(state: TrainingState) -> FileTensors:
    """Return the file tensors of a trained parameter."""
    tensors = {
        "master": state.master,
        FIRST: state.first_moment,
        SECOND: state.second_moment,
        COUNT: torch.tensor(state.update_count),
    }
    return {f"{kind}.{state.name}": tensor.cpu() for kind, tensor in tensors.items()}


def weight_to_tensors(weight: NamedWeight) -> FileTensors:
    """Return the file tensors of a parameter without an optimizer state."""
    return {f"master.{weight.name}": weight.tensor.cpu()}


def buffer_to_tensors(buffer: NamedWeight) -> FileTensors:
    """Return the file tensors of a buffer."""
    return {f"{BUFFER}.{buffer.name}": buffer.tensor.cpu()}


def write_state_files(stream: Iterable[FileTensors], *, directory: str, rank: int) -> list[str]:
    """Write the state assigned to a rank in files of about FILE_BYTES.

    Returns:
        Relative paths.

    Raises:
        CheckpointError: If a file cannot be written. The stream is consumed nevertheless: it is
            collective, so the other ranks would wait for this one.
    """
    written: list[str] = []
    pending: FileTensors = {}
    parameters = iter(stream)
    for tensors in parameters:
        pending |= tensors
        if sum(tensor.nbytes for tensor in pending.values()) >= FILE_BYTES:
            try:
                written.append(
                    _write_file(pending, directory=directory, name=_file_name(rank, len(written)))
                )
            except CheckpointError:
                deque(parameters, maxlen=0)
                raise
            pending = {}
    if pending:
        written.append(
            _write_file(pending, directory=directory, name=_file_name(rank, len(written)))
        )
    return written


def open_saved_state(directory: str) -> SavedState:
    """Open a state written by `write_state_files`, or by another engine with DCP.

    Raises:
        DamagedCheckpointError: If there is neither.
    """
    if has_safetensors_state(directory):
        return open_safetensors_state(directory, partial(safe_open, framework="pt"))
    if has_dcp_state(directory):
        return open_dcp_state(directory)
    raise DamagedCheckpointError(
        f"{directory} has no training state: expected {SAFETENSORS_FOLDER}/*.safetensors, or "
        f"{DCP_FOLDER}/.metadata of an engine that saves with DCP. Load another checkpoint."
    )


def select_saved(saved: SavedState, names: Collection[str], *, file_names: FileNames) -> SavedState:
    """Select weights by their names in Hugging Face files.

    `has_moments` is computed again, for the selected weights only: a checkpoint that contains an
    adapter and its base weights has moments for the adapter alone.
    """
    if has_safetensors_state(saved.directory):
        stored = {
            name
            for path in Path(saved.directory, SAFETENSORS_FOLDER).glob("*.safetensors")
            for name in _tensor_names(path)
        }
    else:
        stored = set(
            SafeDcpReader(Path(saved.directory, DCP_FOLDER)).read_metadata().state_dict_metadata
        )
    saved_name_of = map_to_saved_names(saved, file_names)
    saved_names = dict.fromkeys(saved_name_of[name] for name in names)
    selected = replace(
        saved,
        weights={name: saved.weights[name] for name in saved_names},
        has_moments=have_moments(saved_names, stored),
    )
    split_saved, requested = split_saved_experts(selected, file_names), frozenset(names)
    # A saved tensor can contain all experts in a layer. Its split also yields those that were not
    # requested.
    return replace(
        split_saved,
        weights={name: shape for name, shape in split_saved.weights.items() if name in requested},
    )


def _tensor_names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        names: list[str] = file.keys()
    return names


def _file_name(rank: int, number: int) -> str:
    return f"part-{rank:05d}-{number:05d}.safetensors"


def _write_file(tensors: FileTensors, *, directory: str, name: str) -> str:
    relative = f"{SAFETENSORS_FOLDER}/{name}"
    path = Path(directory, relative)
    with _report_write_errors(path):
        save_file(tensors, path)
    return relative


@contextmanager
def _report_write_errors(path: Path) -> Iterator[None]:
    """Create the parent folder; convert errors inside the context to CheckpointError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    # Errors that Python, torch and safetensors raise on a full disk.
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"could not write {path} ({error}): free disk space, or save to a folder that this "
            "process may write."
        ) from error


def get_rng_states(
    device: torch.device, *, generators: Mapping[str, torch.Generator]
) -> dict[str, Tensor]:
    """Return this rank's RNG states: torch's, Megatron's, and those of other generators."""
    states = {"cpu": torch.get_rng_state()} | {
        name: generator.get_state() for name, generator in generators.items()
    }
    with support_missing_cuda():
        states |= {
            f"{_MEGATRON_PREFIX}{name}": state
            for name, state in get_cuda_rng_tracker().get_states().items()
        }
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
    with _report_write_errors(path):
        torch.save(dict(states), path)
    return relative


def load_rng_states(
    *,
    directory: str,
    rank: int,
    device: torch.device,
    generators: Mapping[str, torch.Generator],
) -> None:
    """Restore this rank's RNG states if the checkpoint has any for it."""
    path = Path(directory, RNG_FOLDER, f"rank_{rank}.pt")
    if not path.exists():
        return
    # weights_only: a checkpoint may come from others and must not run code.
    states: dict[str, Tensor] = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    megatron_states = {
        name.removeprefix(_MEGATRON_PREFIX): state
        for name, state in states.items()
        if name.startswith(_MEGATRON_PREFIX)
    }
    if megatron_states:
        get_cuda_rng_tracker().set_states(megatron_states)
    for name in states.keys() & generators.keys():
        generators[name].set_state(states[name])


def write_adapter(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], *, directory: str
) -> list[str]:
    """Write an adapter in PEFT format; return relative paths.

    Raises:
        CheckpointError: If a file cannot be written.
    """
    folder = Path(directory, ADAPTER_FOLDER)
    with _report_write_errors(folder / ADAPTER_CONFIG):
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    with _report_write_errors(folder / ADAPTER_WEIGHTS):
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            folder / ADAPTER_WEIGHTS,
            {"format": "pt"},
        )
    return [f"{ADAPTER_FOLDER}/{name}" for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]


def write_model_config(fields: dict[str, object], *, directory: str) -> str:
    """Write the model's config.json; return the relative path.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    path = Path(directory, "huggingface", "config.json")
    with _report_write_errors(path):
        path.write_text(json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n")
    return "huggingface/config.json"
