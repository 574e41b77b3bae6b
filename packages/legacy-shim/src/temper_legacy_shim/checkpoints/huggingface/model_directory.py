"""Read Hugging Face model directories lazily, by index, from safetensors or torch files."""

import json
import math
from itertools import pairwise
from pathlib import Path, PurePosixPath

from temper_legacy_shim.checkpoints import rank_files
from temper_legacy_shim.checkpoints.files.archive import FileBytes
from temper_legacy_shim.checkpoints.files.dtypes import BY_TAG
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, Stored, num_bytes
from temper_legacy_shim.checkpoints.layouts import read_object
from temper_legacy_shim.errors import DamagedFileError, LayoutError

_MAX_HEADER = 100_000_000


def has_weights(folder: Path) -> bool:
    """Check if a directory holds weights of a model."""
    names = (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    )
    return any((folder / name).is_file() for name in names)


def read_weights(folder: Path) -> dict[str, LazyTensor]:
    """Return every tensor of a model directory.

    Raises:
        LayoutError: it has no weights, or a shard is missing.
        DamagedFileError: a file is damaged, or contradicts the index.
    """
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            return _read_indexed(folder, index)
    if (folder / "model.safetensors").is_file():
        return read_safetensors(folder / "model.safetensors")
    if (folder / "pytorch_model.bin").is_file():
        return rank_files.read_weights({0: folder / "pytorch_model.bin"}, where=folder)
    raise LayoutError(
        f"{folder} has neither model.safetensors nor pytorch_model.bin: give a Hugging Face model "
        "directory."
    )


def _read_indexed(folder: Path, index: str) -> dict[str, LazyTensor]:
    """Return the tensors of the files that an index names.

    The index is not trusted: each of its names has to be a file of this folder.
    """
    positions = read_object(folder / index).get("weight_map")
    if not isinstance(positions, dict) or not all(
        isinstance(name, str) for name in positions.values()
    ):
        raise DamagedFileError(f"{folder / index} has no weight_map of names: copy it again.")
    tensors: dict[str, LazyTensor] = {}
    for name in sorted(set(positions.values())):
        pure = PurePosixPath(name)
        if (
            pure.is_absolute()
            or len(pure.parts) != 1
            or name in (".", "..")
            or "\\" in name
            or "\0" in name
        ):
            raise DamagedFileError(
                f"{folder / index} refers to {name!r:.200}, which lies outside its folder: it is "
                "no genuine checkpoint."
            )
        if not (folder / name).is_file():
            raise LayoutError(f"{folder} lacks {name}, which its index names: copy it here.")
        path = folder / name
        tensors |= (
            read_safetensors(path)
            if name.endswith(".safetensors")
            else rank_files.read_weights({0: path}, where=folder)
        )
    absent = sorted(set(positions) - set(tensors))
    if absent:
        raise DamagedFileError(
            f"{folder / index} names {absent[0]}, which {positions[absent[0]]} does not hold: copy "
            "the files again."
        )
    return tensors


def read_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Return every tensor of one safetensors file.

    Raises:
        DamagedFileError: the header is malformed, or a tensor lies outside the file.
    """
    file = FileBytes(path)
    size = file.size
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(_MAX_HEADER, size - 8):
        raise DamagedFileError(
            f"{path} announces a header of {length} bytes, but has {size}: it is truncated or no "
            "safetensors file."
        )
    try:
        header = json.loads(file.read(8, length))
        header.pop("__metadata__", None)
        result = {
            name: _described(file, name, entry, data=8 + length, size=size)
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(
            f"{path} has a malformed header ({error}): copy it again."
        ) from error
    ordered = sorted((tensor.offset, name) for name, tensor in result.items() if num_bytes(tensor))
    for (start, name), (following, other) in pairwise(ordered):
        if start + num_bytes(result[name]) > following:
            raise DamagedFileError(f"{path}: {other} begins inside {name}: copy it again.")
    return dict(result)


def _described(
    file: FileBytes, name: str, entry: dict[str, object], *, data: int, size: int
) -> Stored:
    dtype, shape, offsets = BY_TAG[str(entry["dtype"])], entry["shape"], entry["data_offsets"]
    if (
        not isinstance(shape, list)
        or not isinstance(offsets, list)
        or not all(isinstance(n, int) and n >= 0 for n in (*shape, *offsets))
    ):
        raise ValueError(f"{name} has no shape and place")
    start, stop = offsets
    if stop - start != math.prod(shape) * dtype.num_bytes or data + stop > size:
        raise DamagedFileError(
            f"{file.path}: {name} has shape {shape}, which does not fit its place in {size} bytes: "
            "copy it again."
        )
    return Stored(file=file, offset=data + start, shape=tuple(shape), dtype=dtype)
