"""Reading torch's distributed checkpoints without executing their metadata.

torch unpickles the file `.metadata` with the standard unpickler, so whoever can write to a checkpoint
folder could run code in every process that reads it.
"""

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from temper_engine_api.errors import CheckpointError

METADATA_FILE = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata")),
        *(
            (_METADATA, name)
            for name in ("ChunkStorageMetadata", "TensorProperties", "StorageMeta")
        ),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),  # looks a name up in a table
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
        ("collections", "OrderedDict"),
    }
)
"""What the metadata of tensors is made of. Not BytesStorageMetadata: torch unpickles such entries."""
_DTYPES = frozenset(
    {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32"}
    | {"int16", "int8", "uint8", "bool"}
)


class SafeDcpReader(FileSystemReader):
    """A `FileSystemReader` whose metadata can name nothing but the parts of a tensor's description."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the checkpoint's metadata.

        Raises:
            CheckpointError: If it is damaged, or names anything else than tensors; nothing is executed.
        """
        path = Path(self.path, METADATA_FILE)
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file, path).load()
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            TypeError,
            AttributeError,
            IndexError,
        ) as error:
            raise CheckpointError(
                f"{path} can't be read ({error}): copy the checkpoint again."
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(
                f"{path} holds a {type(metadata).__name__}, not the metadata of a checkpoint."
            )
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """The standard unpickler with an allowlist, as Python's documentation advises."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{self._path} asks for {module}.{name}, which the metadata of tensors does not need. Nothing "
            "was executed. Find out who wrote to this checkpoint before you use it."
        )
