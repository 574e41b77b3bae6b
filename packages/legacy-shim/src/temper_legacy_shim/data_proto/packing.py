"""Serialize a batch to plain values, so that reading one runs no code of the sender."""

import pickle
import zipfile
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from temper_engine_api.errors import BatchError
from temper_legacy_shim.data_proto.columns import Array, Columns

FORMAT = "temper.DataProto/1"
"""Begins every state and file; another one is refused."""

State = tuple[str, "dict[str, PackedTensor] | None", int, dict[str, Array], dict[str, object]]
PackedTensor = tuple[str, tuple[int, ...], "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"]
"""dtype, shape, bytes: NumPy hands the bytes to Ray and to pickle's protocol 5 without a copy."""
_PLAIN = (str, int, float, bool, type(None))


def pack(batch: Columns | None, arrays: dict[str, Array], settings: dict[str, object]) -> State:
    """Return the pickled state of a batch."""
    tensors = None if batch is None else {name: _pack_tensor(tensor) for name, tensor in batch.items()}
    return FORMAT, tensors, 0 if batch is None else batch.num_rows, arrays, settings


def unpack(state: object) -> tuple[Columns | None, dict[str, Array], dict[str, object]]:
    """Return the parts of a batch again.

    Raises:
        BatchError: a state that another class of that name wrote.
    """
    if not isinstance(state, tuple) or len(state) != 5 or state[0] != FORMAT:
        raise BatchError(
            "this pickled DataProto was written by the older generation, whose pickles run code: read it there, and hand over tensors with "
            "DataProto.from_dict or save_to_disk."
        )
    _, tensors, num_rows, arrays, settings = cast("State", state)
    if tensors is None:
        return None, arrays, settings
    return Columns({name: _unpack_tensor(packed) for name, packed in tensors.items()}, num_rows=num_rows), arrays, settings


def write_file(path: str, batch: Columns | None, arrays: Mapping[str, Array], settings: Mapping[str, object]) -> None:
    """Write a new file; see ``DataProto.save_to_disk``."""
    content = {
        "format": FORMAT,
        "num_rows": None if batch is None else batch.num_rows,
        "tensors": {name: tensor.detach().cpu().contiguous() for name, tensor in (batch or {}).items()},
        "arrays": {name: [str(array.dtype), _plain(array.tolist(), where=name)] for name, array in arrays.items()},
        "meta_info": _plain(dict(settings), where="meta_info"),
    }
    with open(path, "xb") as file:
        torch.save(content, file)


def read_file(path: str) -> tuple[Columns | None, dict[str, Array], dict[str, object]]:
    """Read it without executing a pickle; see ``DataProto.load_from_disk``."""
    try:
        if not zipfile.is_zipfile(path):
            raise pickle.UnpicklingError("a bare pickle")
        content = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise BatchError(
            f"{path} is no file of DataProto.save_to_disk, or a pickle of the older generation, which is not executed: read it there and "
            "write its tensors again."
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BatchError(f"{path} holds no DataProto of the format {FORMAT}.")
    num_rows = content["num_rows"]
    batch = None if num_rows is None else Columns(content["tensors"], num_rows=num_rows)
    return batch, {name: _array(dtype, items) for name, (dtype, items) in content["arrays"].items()}, content["meta_info"]


def _pack_tensor(tensor: Tensor) -> PackedTensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy()


def _unpack_tensor(packed: PackedTensor) -> Tensor:
    name, shape, data = packed
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BatchError(f"a packed tensor claims the dtype {name!r}, which torch does not have.")
    # What arrives through shared memory is read-only, and torch needs memory of its own.
    return torch.from_numpy(np.array(data, dtype=np.uint8)).view(dtype).reshape(shape)


def _array(dtype: str, items: list[object]) -> Array:
    if dtype != "object":
        return np.array(items, dtype=dtype)
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def _plain(value: object, *, where: str) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where=f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where=f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if not isinstance(value, _PLAIN):
        raise BatchError(f"{where} is a {type(value).__name__}, which has no plain form: leave it out before saving.")
    return value
