"""Read the training state of another engine's checkpoint.

Two formats are known: full tensors in `state/*.safetensors`, and torch's distributed checkpoint in
`dcp/`. The keys of a weight are

* `first_moment.NAME`, `second_moment.NAME` and `update_count.NAME`,
* `master.NAME` in safetensors, the weight in float32,
* `parameter.NAME` in DCP, the weight in float32 or in a lower precision.

NAME is the Hugging Face name, or the PEFT name of an adapter tensor.
"""

import pickle
import struct
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from temper_engine_api.errors import CheckpointError
from temper_engine_api.weights import NamedWeight, TrainingState, WeightEntry

DCP_FOLDER = "dcp"
"""Folder of torch's distributed checkpoint."""
SAFETENSORS_FOLDER = "state"
"""Folder of safetensors files."""
FIRST, SECOND, COUNT = "first_moment", "second_moment", "update_count"
"""Kinds of tensors saved in addition to the weight; each is the first part of a key."""
BUFFER = "buffer"
"""Kind of a tensor of the model's files that is not trained."""


def select_buffers(keys: Iterable[str]) -> frozenset[str]:
    """Return the names of the buffers among the keys of saved tensors."""
    prefix = f"{BUFFER}."
    return frozenset(key.removeprefix(prefix) for key in keys if key.startswith(prefix))


def have_moments(names: Iterable[str], keys: Collection[str]) -> bool:
    """Return True if the keys of saved tensors have the AdamW state of every named weight."""
    return all(f"{kind}.{name}" in keys for name in names for kind in (FIRST, SECOND, COUNT))


METADATA_FILE = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_WITH_ATTRIBUTES = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata")),
        *(
            (_METADATA, name)
            for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    }
)
"""Classes whose objects get their attributes from the metadata."""
_ALLOWED = _WITH_ATTRIBUTES | frozenset(
    {
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),  # looks a name up in a table
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
        ("collections", "OrderedDict"),
    }
)
"""Classes and functions that the metadata of tensors may name.

BytesStorageMetadata is not allowed, because torch unpickles the entries that it describes.
"""
_DTYPES = frozenset(
    {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32"}
    | {"int16", "int8", "uint8", "bool"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Training state in a checkpoint, read tensor by tensor."""

    directory: str
    """Engine folder of the step directory."""
    weights: Mapping[str, tuple[int, ...]]
    """Full shape by Hugging Face name."""
    has_moments: bool
    """True if all weights have AdamW moments and update counts."""
    read: Callable[[str, str], Tensor]
    """Reads a tensor by kind and name; the kind `weight` is the weight itself."""
    buffers: frozenset[str] = frozenset()
    """Names of tensors of the kind `buffer`, which are not trained."""

    def list_entries(self) -> list[WeightEntry]:
        """List the weights, to check them before the first tensor is read."""
        return [
            WeightEntry(name=name, shape=shape, dtype=torch.float32)
            for name, shape in self.weights.items()
        ]

    def iterate_weights(self) -> Iterator[NamedWeight]:
        """Iterate over the weights in float32, one at a time."""
        for name in self.weights:
            yield NamedWeight(name, self.read("weight", name).float())

    def iterate_state(self) -> Iterator[TrainingState]:
        """Iterate over the training state, one parameter at a time.

        Raises:
            CheckpointError: If there are no AdamW moments.
        """
        if not self.has_moments:
            raise CheckpointError(
                f"{self.directory} has weights without AdamW moments: resume with the engine and "
                "the optimizer that wrote it, or start again with model.path at the saved model."
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
    """Return True if an engine folder has a torch distributed checkpoint."""
    return Path(directory, DCP_FOLDER, ".metadata").is_file()


def has_safetensors_state(directory: str | Path) -> bool:
    """Return True if an engine folder has safetensors with a training state."""
    return any(Path(directory, SAFETENSORS_FOLDER).glob("*.safetensors"))


class SafetensorsFile(Protocol):
    """The methods of an open `safetensors.safe_open` that are used here."""

    def keys(self) -> list[str]:
        """Return the names of the tensors."""

    def get_slice(self, name: str) -> Any:
        """Return an object whose `get_shape()` reads no data."""

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor."""


def open_safetensors_state(
    directory: str, open_file: Callable[[Path], AbstractContextManager[SafetensorsFile]]
) -> SavedState:
    """Open the state in `state/`. Not collective: each calling rank reads full tensors from disk.

    Args:
        directory: Engine folder of the step directory.
        open_file: `safetensors.safe_open` with `framework="pt"`. This package does not depend on
            safetensors.
    """
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(directory, SAFETENSORS_FOLDER).glob("*.safetensors")):
        with open_file(path) as file:
            names = file.keys()
            files |= dict.fromkeys(names, path)
            shapes |= {
                name.removeprefix("master."): tuple(file.get_slice(name).get_shape())
                for name in names
                if name.startswith("master.")
            }

    def read(kind: str, name: str) -> Tensor:
        key = f"{'master' if kind == 'weight' else kind}.{name}"
        with open_file(files[key]) as file:
            return file.get_tensor(key)

    return SavedState(
        directory=directory,
        weights=shapes,
        has_moments=have_moments(shapes, files),
        read=read,
        buffers=select_buffers(files),
    )


def open_dcp_state(directory: str) -> SavedState:
    """Open the state in `dcp/`. Not collective: each calling rank reads full tensors from disk."""
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
            # torch warns without a process group, but reading on one rank is intended here.
            warnings.filterwarnings(
                "ignore", message="torch.distributed is disabled", category=UserWarning
            )
            load({key: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    return SavedState(
        directory=directory,
        weights=weights,
        has_moments=have_moments(weights, saved),
        read=read,
        buffers=select_buffers(saved),
    )


class SafeDcpReader(FileSystemReader):
    """A `FileSystemReader` that does not execute the metadata file.

    torch unpickles `.metadata` with the standard unpickler, so whoever can write to a checkpoint
    folder could run code in every process that reads it. This reader refuses all names that the
    metadata of tensors does not need.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the checkpoint's metadata, which is read from disk once.

        Raises:
            CheckpointError: If it is damaged, or contains a name that the metadata of tensors
                does not need. No code from the file is executed.
        """
        # torch asks for it with every tensor that is read. It describes all tensors, so reading it
        # each time would take hours for a model with thousands of experts.
        if self._metadata is None:
            self._metadata = _read_metadata(Path(self.path, METADATA_FILE))
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file, path).load()
    except CheckpointError:
        raise
    except (
        # Damaged bytes may raise any of these, in the unpickler or in a constructor.
        *(pickle.UnpicklingError, struct.error, EOFError, MemoryError),
        *(ArithmeticError, AssertionError, AttributeError, LookupError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        raise CheckpointError(
            f"{path} can't be read ({error}): copy the checkpoint again."
        ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"{path} contains a {type(metadata).__name__} instead of the metadata of a "
            "checkpoint: copy the checkpoint again."
        )
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    return metadata


class _Unpickler(pickle._Unpickler):
    """Unpickle allowed names only, as Python's documentation advises, and change no class.

    The base class is pickle's Python implementation, because the C implementation has no hook for
    the opcode BUILD. BUILD sets attributes of a new object, but a pickle can also make it change a
    class such as PosixPath for the entire process.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{self._path} names {module}.{name}, which the metadata of tensors does not need. "
            "Nothing was executed. Find out who wrote to this checkpoint before you use it."
        )

    def load_build(self) -> None:
        """Set the attributes of an object that this pickle has made."""
        kind = type(self.stack[-2])  # type: ignore[attr-defined]
        if (kind.__module__, kind.__name__) not in _WITH_ATTRIBUTES:
            raise CheckpointError(
                f"{self._path} sets attributes of a {kind.__name__}, which the metadata of tensors "
                "does not need. Nothing was changed. Find out who wrote to this checkpoint before "
                "you use it."
            )
        super().load_build()  # type: ignore[misc]

    # pickle looks the functions of its opcodes up in this table.
    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}
