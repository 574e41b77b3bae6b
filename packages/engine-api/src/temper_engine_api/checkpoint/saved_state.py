"""The training state inside an engine's part of a checkpoint, so that one engine goes on from what another one wrote.

Two places are known: ``state/*.safetensors``, whole tensors, and ``dcp/``, torch's distributed checkpoint. Tensors go by kind and Hugging
Face name (an adapter's by PEFT name): a weight, ``first_moment.NAME``, ``second_moment.NAME`` and ``update_count.NAME``. Weights are
``master.NAME`` in safetensors and ``parameter.NAME`` in DCP, where they may be of a lower precision than float32.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from temper_engine_api.checkpoint.dcp_reader import SafeDcpReader
from temper_engine_api.errors import CheckpointError
from temper_engine_api.weights import NamedWeight, TrainingState, WeightEntry

DCP_FOLDER = "dcp"
"""Of torch's distributed checkpoint."""
SAFETENSORS_FOLDER = "state"
"""Of safetensors."""
FIRST, SECOND, COUNT = "first_moment", "second_moment", "update_count"
"""Kinds beside the weight itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What a checkpoint holds, tensor by tensor."""

    directory: str
    """Of the engine's part."""
    weights: Mapping[str, tuple[int, ...]]
    """Full shape by Hugging Face name."""
    has_moments: bool
    """Whether it holds adamw's moments and counts of these weights."""
    read: Callable[[str, str], Tensor]
    """A tensor by kind and name; the kind ``weight`` is the weight itself."""

    def entries(self) -> list[WeightEntry]:
        """The weights, for a check before the first one is read."""
        return [
            WeightEntry(name=name, shape=shape, dtype=torch.float32)
            for name, shape in self.weights.items()
        ]

    def iterate_weights(self) -> Iterator[NamedWeight]:
        """One at a time, float32."""
        for name in self.weights:
            yield NamedWeight(name, self.read("weight", name).float())

    def iterate_state(self) -> Iterator[TrainingState]:
        """One parameter at a time.

        Raises:
            CheckpointError: there are no moments of adamw.
        """
        if not self.has_moments:
            raise CheckpointError(
                f"{self.directory} holds weights without moments of adamw: resume with the engine and the optimizer that made it, or begin "
                "anew with model.path at the model that the other run saved."
            )
        for name in self.weights:
            yield TrainingState(
                name=name,
                master=self.read("weight", name).float(),
                first_moment=self.read(FIRST, name).float(),
                second_moment=self.read(SECOND, name).float(),
                update_count=int(self.read(COUNT, name)),
            )


def has_dcp_state(directory: str | Path) -> bool:
    """Whether an engine's part of a checkpoint holds torch's distributed checkpoint."""
    return Path(directory, DCP_FOLDER, ".metadata").is_file()


def has_safetensors_state(directory: str | Path) -> bool:
    """Whether an engine's part of a checkpoint holds safetensors with a training state."""
    return any(Path(directory, SAFETENSORS_FOLDER).glob("*.safetensors"))


def open_dcp_state(directory: str) -> SavedState:
    """The state in ``dcp/``; no communication: every rank that asks reads whole tensors from the disk."""
    reader = SafeDcpReader(Path(directory, DCP_FOLDER))
    saved = {
        name: m
        for name, m in reader.read_metadata().state_dict_metadata.items()
        if isinstance(m, TensorStorageMetadata)
    }
    weights = {
        name.partition(".")[2]: tuple(m.size)
        for name, m in saved.items()
        if name.startswith("parameter.")
    }

    def read(kind: str, name: str) -> Tensor:
        key = f"{'parameter' if kind == 'weight' else kind}.{name}"
        tensor = torch.empty(saved[key].size, dtype=saved[key].properties.dtype)
        with warnings.catch_warnings():
            # Reading alone is the intent, with or without a process group.
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled", category=UserWarning
            )
            load({key: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    has_moments = all(
        f"{kind}.{name}" in saved for name in weights for kind in (FIRST, SECOND, COUNT)
    )
    return SavedState(directory=directory, weights=weights, has_moments=has_moments, read=read)
