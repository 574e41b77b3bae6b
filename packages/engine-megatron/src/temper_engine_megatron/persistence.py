"""The engine's part of a checkpoint: the portable training state as safetensors, and each rank's random-number state.

The state is written full and by Hugging Face name, so that any layout reads it; rank 0 writes, every rank takes part. Random-number states
belong to ranks: one that finds none of its own (more ranks than before) goes on with the stream it has.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from temper_engine_api.errors import CheckpointError, DamagedCheckpointError
from temper_engine_api.weights import TrainingState, WeightEntry, check_saved

FILE_BYTES = 2 << 30
STATE_FOLDER = "state"
RANDOM_FOLDER = "random"
_PARTS = ("master", "first_moment", "second_moment")
_COUNT = "update_count"


def write_state(stream: Iterable[TrainingState], *, directory: str, is_writer: bool) -> list[str]:
    """Write a stream of state, about FILE_BYTES a file; relative paths. Every rank consumes the stream, one writes.

    Raises:
        CheckpointError: a file can't be written.
    """
    written: list[str] = []
    held: dict[str, Tensor] = {}
    for state in stream:
        if not is_writer:
            continue
        held |= {f"{part}.{state.name}": getattr(state, part).cpu() for part in _PARTS}
        held[f"{_COUNT}.{state.name}"] = torch.tensor(state.update_count)
        if sum(tensor.nbytes for tensor in held.values()) >= FILE_BYTES:
            written.append(_write_file(held, directory=directory, number=len(written)))
            held = {}
    if held:
        written.append(_write_file(held, directory=directory, number=len(written)))
    return written


def read_state(*, directory: str, expected: Iterable[WeightEntry]) -> Iterator[TrainingState]:
    """What ``write_state`` wrote, one parameter at a time.

    Raises:
        CheckpointError: another model made it; nothing is given out then.
    """
    files = sorted(Path(directory, STATE_FOLDER).glob("*.safetensors"))
    if not files:
        raise DamagedCheckpointError(f"{directory} holds no training state of the Megatron engine ({STATE_FOLDER}/*.safetensors).")
    saved = [entry for path in files for entry in _masters_in(path)]
    check_saved(expected, saved, directory=directory)
    for path in files:
        with safe_open(path, framework="pt") as file:
            for entry in _masters_in(path):
                yield TrainingState(
                    name=entry.name,
                    master=file.get_tensor(f"master.{entry.name}"),
                    first_moment=file.get_tensor(f"first_moment.{entry.name}"),
                    second_moment=file.get_tensor(f"second_moment.{entry.name}"),
                    update_count=int(file.get_tensor(f"{_COUNT}.{entry.name}")),
                )


def _masters_in(path: Path) -> list[WeightEntry]:
    with safe_open(path, framework="pt") as file:
        tensors: list[str] = file.keys()
        names = [name.removeprefix("master.") for name in tensors if name.startswith("master.")]
        shapes = {name: tuple(file.get_slice(f"master.{name}").get_shape()) for name in names}
    return [WeightEntry(name=name, shape=shape, dtype=torch.float32) for name, shape in shapes.items()]


def _write_file(tensors: dict[str, Tensor], *, directory: str, number: int) -> str:
    relative = f"{STATE_FOLDER}/part-{number:05d}.safetensors"
    path = Path(directory, relative)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)
    except (OSError, RuntimeError) as error:  # safetensors wraps a full disk in its own error, which is neither
        raise CheckpointError(f"could not write {path} ({error})") from error
    return relative


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


def read_random_state(*, directory: str, rank: int, device: torch.device) -> None:
    """Restore this rank's random-number state, where the checkpoint has one for it."""
    path = Path(directory, RANDOM_FOLDER, f"rank_{rank}.pt")
    if not path.exists():
        return
    states: dict[str, Tensor] = torch.load(path, weights_only=True)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def write_description(fields: dict[str, object], *, directory: str) -> str:
    """Write the model's own config.json; its relative path."""
    path = Path(directory, "huggingface", "config.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n")
    return "huggingface/config.json"
