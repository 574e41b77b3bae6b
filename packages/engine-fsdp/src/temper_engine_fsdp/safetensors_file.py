"""Safetensors files written tensor by tensor: the names, shapes and dtypes are known before the first one is there.

The format: eight bytes with the length of a JSON header, the header, then the tensors' bytes, one after the other.
Source: https://github.com/huggingface/safetensors, README, "Format".
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch

from temper_engine_api.weights import NamedWeight, WeightEntry

_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def bytes_of(entry: WeightEntry) -> int:
    """Size of its data."""
    return prod(entry.shape) * entry.dtype.itemsize


def write_safetensors(path: Path, entries: Sequence[WeightEntry], weights: Iterator[NamedWeight]) -> None:
    """Write these entries, which are the next of the stream."""
    with open(path, "wb") as file:
        file.write(_header(entries))
        for entry in entries:
            name, tensor = next(weights)
            assert (name, tuple(tensor.shape), tensor.dtype) == (entry.name, entry.shape, entry.dtype), "the stream is not as announced"
            if tensor.numel() > 0:
                # Not numpy's tofile: what it still buffers when the disk is full is lost without an error.
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _header(entries: Sequence[WeightEntry]) -> bytes:
    # Libraries refuse a file whose metadata does not say which framework wrote it.
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        end = begin + bytes_of(entry)
        fields[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
