"""Find damage in the files of a model directory without importing torch."""

import json
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_PICKLE_PROTOCOL = b"\x80"
"""First byte of a pickle."""
_LFS_POINTER = b"version https://git-lfs"
"""Start of files that git writes in place of large ones when git-lfs is not installed."""


def find_damaged_model(folder: Path) -> str | None:
    """Return a message about the first damaged file of a model that Temper wrote, or None.

    Its JSON files must be readable, because transformers and vLLM load the model and its tokenizer
    from them. The weights are checked as in `find_damaged_weights`.
    """
    config = folder / "config.json"
    if not config.is_file():
        return f"{config} is not there: write the model again."
    for path in sorted(folder.glob("*.json")):
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return f"{path} cannot be read as JSON: write the model again."
        if path == config and not (isinstance(fields, dict) and "model_type" in fields):
            return f"{path} has no model_type: write the model again."
    return find_damaged_weights(folder)


def find_damaged_weights(folder: Path) -> str | None:
    """Return a message about the first damaged weight file of a model or adapter, or None.

    No file may be empty. Files of torch.save are zip archives, whose directory is at the end, or
    pickles from older versions, where only the start is checked. A safetensors file starts with the
    length of its header in 8 bytes; the header has the end offset of each tensor. Only the headers
    are read. An index must name tensors that its files have.
    """
    weights = sorted(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern))
    if not weights:
        return f"{folder} has no weights (no *.safetensors or *.bin): copy or download them again."
    tensors: dict[str, Collection[str]] = {}
    for path in weights:
        if damage := _find_damaged_file(path):
            return damage
        if path.suffix == ".safetensors":
            try:
                tensors[path.name] = _read_tensor_names(path)
            except ValueError as error:
                return str(error)
    for index in sorted(folder.glob("*.safetensors.index.json")):
        if damage := _find_damaged_index(index, tensors=tensors):
            return damage
    return None


def _find_damaged_file(path: Path) -> str | None:
    """Return a message about a weight file that is not one, without reading its header."""
    if path.is_symlink() and not path.exists():
        return (
            f"{path} is a link to {path.readlink()}, which is not there: copy or download the file "
            "itself."
        )
    if not path.is_file():
        return f"{path} is not a file: copy or download the weights again."
    if path.stat().st_size == 0:
        return f"{path} is empty: copy or download it again."
    if _starts_with(path, _LFS_POINTER):
        return (
            f"{path} is a pointer of git-lfs without the weights: run git lfs pull in that "
            "clone, or download the model with hf download."
        )
    if path.suffix != ".safetensors" and not _is_saved_by_torch(path):
        return f"{path} is truncated, or was not written by torch.save: copy or download it again."
    return None


def _find_damaged_index(index: Path, *, tensors: Mapping[str, Collection[str]]) -> str | None:
    """Return a message if an index does not fit the safetensors files of its folder.

    Args:
        index: File that names the shard of every tensor.
        tensors: Names of the tensors in each file.
    """
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        shards = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{index} is not an index of weights: copy or download it again."
    if absent := sorted(name for name in shards if not (index.parent / name).is_file()):
        return (
            f"{index} names {absent[0]}, which is not there: download the missing files "
            f"({len(absent)} of {len(shards)})."
        )
    for name, shard in weight_map.items():
        if name not in tensors.get(shard, (name,)):
            return (
                f"{index.parent / shard} has no tensor {name}, which {index} expects there: copy "
                "or download the directory again."
            )
    return None


def _read_tensor_names(path: Path) -> Collection[str]:
    """Return the names of the tensors in a safetensors file.

    Raises:
        ValueError: If the file is truncated or has no header.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        # Read by hand: the safetensors library returns tensors of a framework, and importing
        # one would take most of the time.
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            if _starts_with(path, b"<"):
                raise ValueError(
                    f"{path} is a web page in place of weights: download the file itself, for "
                    "example with hf download."
                )
            raise ValueError(
                f"{path} has {size} bytes and is truncated: copy or download it again."
            )
        try:
            header: dict[str, dict[str, list[int]]] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            # The header is at the start, so a truncated file still has it: only the size shows
            # the loss.
            ends = [entry["data_offsets"][1] for entry in header.values()]
            end = 8 + length + max(ends, default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} has a header that is not JSON: copy or download it again."
            ) from error
    if end != size:
        raise ValueError(
            f"{path} has {size} bytes, but must have {end} by its header: copy it again."
        )
    return header.keys()


def _starts_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _is_saved_by_torch(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == _PICKLE_PROTOCOL or zipfile.is_zipfile(file)
