"""The engine's part of a checkpoint: the portable training state as safetensors, and each rank's random-number state.

The state is written in whole tensors by Hugging Face name, so that any layout reads it; each rank writes its share of them into files of
its own. What one rank wrote alone (0.1) is read too, and what an engine on torch's distributed checkpoint wrote. Random-number states
belong to ranks: one that finds none of its own (more ranks than before) goes on with the stream it has.
"""

import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from temper_engine_api.checkpoint.dcp_reader import SafeDcpReader
from temper_engine_api.checkpoint.saved_state import (
    COUNT,
    DCP_FOLDER,
    FIRST,
    SAFETENSORS_FOLDER,
    SECOND,
    SavedState,
    has_dcp_state,
    has_safetensors_state,
    open_dcp_state,
)
from temper_engine_api.errors import CheckpointError, DamagedCheckpointError
from temper_engine_api.weights import NamedWeight, TrainingState
from temper_engine_megatron.huggingface import expert_names
from temper_engine_megatron.huggingface.weight_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from temper_engine_megatron.runtime.cpu_device import megatron_on_cpu

FILE_BYTES = 2 << 30
RANDOM_FOLDER, ADAPTER_FOLDER = "random", "adapter"
_OF_MEGATRON = "megatron."
"""Before the name of one of Megatron's own states."""
OTHER_SYSTEMS = (
    "adapter_checkpoint",
    "mp_rank_*",
    "dist_ckpt",
    "iter_*",
    "latest_checkpointed_iteration.txt",
)
"""What other systems on Megatron leave in a role's folder of a checkpoint, or in one inside it."""
_INSIDE = ("", "model/", "*/", "*/model/")
"""Where that lies: a role's folder is given, or a step's with a folder for each role."""

FileTensors = dict[str, Tensor]
"""What belongs to one name, by the names in the file."""


def state_to_tensors(state: TrainingState) -> FileTensors:
    """A parameter with its moments."""
    kinds = {
        "master": state.master,
        FIRST: state.first_moment,
        SECOND: state.second_moment,
        COUNT: torch.tensor(state.update_count),
    }
    return {f"{kind}.{state.name}": tensor.cpu() for kind, tensor in kinds.items()}


def weight_to_tensors(weight: NamedWeight) -> FileTensors:
    """A parameter that is not trained."""
    return {f"master.{weight.name}": weight.tensor.cpu()}


def write_state(stream: Iterable[FileTensors], *, directory: str, rank: int) -> list[str]:
    """Write a rank's share of the state, about FILE_BYTES a file; relative paths.

    Raises:
        CheckpointError: a file can't be written; the stream has been consumed all the same, as the other ranks consume theirs.
    """
    written: list[str] = []
    held: FileTensors = {}
    parts_of_names = iter(stream)
    for parts in parts_of_names:
        held |= parts
        if sum(tensor.nbytes for tensor in held.values()) >= FILE_BYTES:
            try:
                written.append(
                    _write_file(held, directory=directory, name=_file_name(rank, len(written)))
                )
            except CheckpointError:
                deque(parts_of_names, maxlen=0)
                raise
            held = {}
    if held:
        written.append(_write_file(held, directory=directory, name=_file_name(rank, len(written))))
    return written


def open_saved_state(directory: str) -> SavedState:
    """What ``write_state`` wrote, or another engine as torch's distributed checkpoint.

    Raises:
        DamagedCheckpointError: neither is there.
    """
    if has_safetensors_state(directory):
        return _open_files(directory)
    if has_dcp_state(directory):
        return open_dcp_state(directory)
    raise DamagedCheckpointError(
        f"{directory} holds no training state: expected {SAFETENSORS_FOLDER}/*.safetensors, or dcp/.metadata of an engine on torch's distributed "
        "checkpoint."
    )


def _open_files(directory: str) -> SavedState:
    places: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(directory, SAFETENSORS_FOLDER).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors: list[str] = file.keys()
            places |= dict.fromkeys(tensors, path)
            masters = [name for name in tensors if name.startswith("master.")]
            shapes |= {
                name.removeprefix("master."): tuple(file.get_slice(name).get_shape())
                for name in masters
            }

    def read(kind: str, name: str) -> Tensor:
        key = f"{'master' if kind == 'weight' else kind}.{name}"
        with safe_open(places[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor

    return SavedState(
        directory=directory,
        weights=shapes,
        has_moments=_have_moments(shapes, places.keys()),
        read=read,
    )


def part_of(saved: SavedState, names: Collection[str]) -> SavedState:
    """These names of it alone, by names in files: what is trained has moments, also where weights beside it have none."""
    if has_safetensors_state(saved.directory):
        stored = {
            key
            for path in Path(saved.directory, SAFETENSORS_FOLDER).glob("*.safetensors")
            for key in _keys_of(path)
        }
    else:
        stored = set(
            SafeDcpReader(Path(saved.directory, DCP_FOLDER)).read_metadata().state_dict_metadata
        )
    home_of = expert_names.homes(saved)
    here = dict.fromkeys(home_of[name] for name in names)
    homes = replace(
        saved,
        weights={name: saved.weights[name] for name in here},
        has_moments=_have_moments(here, stored),
    )
    own, wanted = expert_names.split_saved_experts(homes), frozenset(names)
    # A joined tensor comes with those of its experts that nobody asked for.
    return replace(
        own, weights={name: shape for name, shape in own.weights.items() if name in wanted}
    )


def _keys_of(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        keys: list[str] = file.keys()
    return keys


def _have_moments(names: Collection[str], stored: Collection[str]) -> bool:
    return all(f"{kind}.{name}" in stored for name in names for kind in (FIRST, SECOND, COUNT))


def _file_name(rank: int, number: int) -> str:
    return f"part-{rank:05d}-{number:05d}.safetensors"


def _write_file(tensors: FileTensors, *, directory: str, name: str) -> str:
    relative = f"{SAFETENSORS_FOLDER}/{name}"
    path = Path(directory, relative)
    with _writing(path):
        save_file(tensors, path)
    return relative


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # a full disk: Python's, torch's and safetensors' error
        raise CheckpointError(f"could not write {path} ({error})") from error


def get_rng_states(
    device: torch.device, *, others: Mapping[str, torch.Generator]
) -> dict[str, Tensor]:
    """This rank's random-number states: torch's, those that Megatron keeps for parts of a model, and those of other generators."""
    states = {"cpu": torch.get_rng_state()} | {
        name: generator.get_state() for name, generator in others.items()
    }
    with megatron_on_cpu():
        states |= {
            f"{_OF_MEGATRON}{name}": state
            for name, state in get_cuda_rng_tracker().get_states().items()
        }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def write_rng_states(states: Mapping[str, Tensor], *, directory: str, rank: int) -> str:
    """Write them; the relative path.

    Raises:
        CheckpointError: the file can't be written.
    """
    relative = f"{RANDOM_FOLDER}/rank_{rank}.pt"
    path = Path(directory, relative)
    with _writing(path):
        torch.save(dict(states), path)
    return relative


def load_rng_states(
    *, directory: str, rank: int, device: torch.device, others: Mapping[str, torch.Generator]
) -> None:
    """Restore this rank's random-number states, where the checkpoint has some for it."""
    path = Path(directory, RANDOM_FOLDER, f"rank_{rank}.pt")
    if not path.exists():
        return
    states: dict[str, Tensor] = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    own = {
        name.removeprefix(_OF_MEGATRON): state
        for name, state in states.items()
        if name.startswith(_OF_MEGATRON)
    }
    if own:
        get_cuda_rng_tracker().set_states(own)
    for name in states.keys() & others.keys():
        others[name].set_state(states[name])


def write_adapter(
    config: Mapping[str, object], tensors: Mapping[str, Tensor], *, directory: str
) -> list[str]:
    """Write an adapter in the format of HF PEFT; relative paths.

    Raises:
        CheckpointError: a file can't be written.
    """
    folder = Path(directory, ADAPTER_FOLDER)
    with _writing(folder / ADAPTER_CONFIG):
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    with _writing(folder / ADAPTER_WEIGHTS):
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            folder / ADAPTER_WEIGHTS,
            {"format": "pt"},
        )
    return [f"{ADAPTER_FOLDER}/{name}" for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]


def check_layout_is_ours(directory: str) -> None:
    """Refuse what another system left in a folder, before it is called incomplete.

    Raises:
        CheckpointError: says how to convert it.
    """
    folder = Path(directory)
    found = next(
        (path for place in _INSIDE for name in OTHER_SYSTEMS for path in folder.glob(place + name)),
        None,
    )
    if found is not None:
        raise CheckpointError(
            f"{directory} holds {found.relative_to(folder)}, which is another system's layout: convert it with "
            f"`temper-migrate checkpoint {directory} --to temper --out NEW` and load NEW."
        )


def write_model_config(fields: dict[str, object], *, directory: str) -> str:
    """Write the model's own config.json; its relative path.

    Raises:
        CheckpointError: the file can't be written.
    """
    path = Path(directory, "huggingface", "config.json")
    with _writing(path):
        path.write_text(json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n")
    return "huggingface/config.json"
