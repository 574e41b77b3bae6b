"""Tensors by name that share their first dimension: the ``data.batch`` of old code.

Batches are serialized to plain values, so that reading one runs no code of the sender.
"""

import pickle
import zipfile
from collections.abc import Iterable, Mapping
from typing import SupportsIndex, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from temper_engine_api.errors import BatchError

Rows = slice | Tensor | list[int]
"""Row selection: a slice, a list of indices, or an index or mask tensor."""


class Columns(dict[str, Tensor]):
    """A dictionary of tensors [B, ...], indexed by name or by rows like a TensorDict.

    Raises:
        BatchError: a value is no tensor, or its first dimension differs from the others'.
    """

    def __init__(
        self, source: Mapping[str, Tensor] | None = None, *, num_rows: int | None = None
    ) -> None:
        super().__init__()
        self._num_rows = num_rows
        for name, tensor in (source or {}).items():
            self[name] = tensor

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        _check_column(name, tensor)
        if self._num_rows is None:
            self._num_rows = tensor.shape[0]
        if tensor.shape[0] != self._num_rows:
            raise BatchError(
                f"column {name!r} has {tensor.shape[0]} rows, but the batch has {self._num_rows}: "
                "cut or pad it before."
            )
        super().__setitem__(name, tensor)

    def __getitem__(self, key: str | Rows | int) -> "Tensor | Columns":  # type: ignore[override]
        if isinstance(key, str):
            if key not in self:
                raise KeyError(f"the batch has no column {key!r}; it has {sorted(self)}")
            return super().__getitem__(key)
        if isinstance(key, int):
            return {name: tensor[key] for name, tensor in self.items()}  # type: ignore[return-value]
        return self.rows(key)

    def column(self, name: str) -> Tensor:
        """Return the column of that name.

        Raises:
            KeyError: the column does not exist; the message lists the columns.
        """
        return cast("Tensor", self[name])

    def rows(self, rows: Rows) -> "Columns":
        index = torch.as_tensor(rows) if isinstance(rows, list) else rows
        count = len(torch.empty(self.num_rows)[index])
        return Columns({name: tensor[index] for name, tensor in self.items()}, num_rows=count)

    @property
    def num_rows(self) -> int:
        return 0 if self._num_rows is None else self._num_rows

    @property
    def batch_size(self) -> torch.Size:
        """[B], as old code reads it."""
        return torch.Size([self.num_rows])

    @property
    def device(self) -> torch.device | None:
        """Device of the columns; None if they differ or there are none."""
        devices = {tensor.device for tensor in self.values()}
        return devices.pop() if len(devices) == 1 else None

    def to(self, device: torch.device | str) -> "Columns":
        return Columns(
            {name: tensor.to(device) for name, tensor in self.items()}, num_rows=self.num_rows
        )

    def select(self, *names: str) -> "Columns":
        return Columns({name: self.column(name) for name in names}, num_rows=self.num_rows)

    def split(self, size: SupportsIndex) -> "list[Columns]":
        """Split into pieces of ``size`` rows; the last may be shorter."""
        step = int(size)
        return [self.rows(slice(first, first + step)) for first in range(0, self.num_rows, step)]

    def rename_key_(self, old: Iterable[str], new: Iterable[str]) -> "Columns":
        """Rename columns in place, all at once.

        Raises:
            BatchError: two columns would have one name.
        """
        names = dict(zip(old, new, strict=True))
        columns = {before: self.column(before) for before in names}
        after = [names.get(name, name) for name in self]
        twice = next((name for name in after if after.count(name) > 1), None)
        if twice is not None:
            raise BatchError(
                f"a column can't be renamed {twice!r}: another one would have that name too."
            )
        for before in names:
            del self[before]
        self.update({names[before]: column for before, column in columns.items()})
        return self

    def contiguous(self) -> "Columns":
        """Return the same columns, each in one piece of memory."""
        return Columns(
            {name: tensor.contiguous() for name, tensor in self.items()}, num_rows=self.num_rows
        )

    def clone(self) -> "Columns":
        return Columns(
            {name: tensor.clone() for name, tensor in self.items()}, num_rows=self.num_rows
        )


def concatenate(parts: "list[Columns]") -> Columns:
    """Return the batches one below the other.

    Raises:
        BatchError: their columns differ.
    """
    head = parts[0]
    for other in parts[1:]:
        if other.keys() != head.keys():
            raise BatchError(
                f"batches with different columns can't be concatenated: {sorted(head)} against "
                f"{sorted(other)}."
            )
    columns = {name: torch.cat([part.column(name) for part in parts]) for name in head}
    return Columns(columns, num_rows=sum(part.num_rows for part in parts))


def _check_column(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or value.ndim == 0:
        result = (
            f"the scalar {value!r}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        )
        raise BatchError(
            f"column {name!r} must be a tensor with a batch dimension, but is {result}."
        )


T = TypeVar("T")
Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def merged_tensors(first: Columns | None, second: Columns | None) -> Columns | None:
    """Return the columns of both.

    Raises:
        BatchError: a column differs, or the lengths do.
    """
    if first is None or second is None:
        return second if first is None else first
    if first.num_rows != second.num_rows:
        raise BatchError(f"batches of {first.num_rows} and {second.num_rows} rows can't be united.")
    return Columns(_merged(first, second, what="tensor"), num_rows=first.num_rows)


def merged_arrays(first: Mapping[str, Array], second: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of both.

    Raises:
        BatchError: an array differs.
    """
    return _merged(first, second, what="non-tensor")


def merged_settings(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of both.

    Raises:
        BatchError: a setting differs.
    """
    return _merged(first, second, what="meta_info")


def _merged(first: Mapping[str, T], second: Mapping[str, T], *, what: str) -> dict[str, T]:
    for name in sorted(first.keys() & second.keys()):
        if not is_same(first[name], second[name]):
            raise BatchError(
                f"{what} entry {name!r} is in both batches with different contents: drop or rename "
                "one of them."
            )
    return {**first, **second}


def is_same(a: object, b: object) -> bool:
    """Check if two values are equal by content; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return same and bool(((a == b.to(a.device)) | ((a != a) & (b != b).to(a.device))).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype == object:
            return all(is_same(x, y) for x, y in zip(a.ravel(), b.ravel(), strict=True))
        return bool(np.array_equal(a, b, equal_nan=np.issubdtype(a.dtype, np.inexact)))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(is_same(x, y) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    return bool(a == b)


FORMAT = "temper.DataProto/1"
"""Start of every state and file; other data is rejected."""

State = tuple[str, "dict[str, PackedTensor] | None", int, dict[str, Array], dict[str, object]]
PackedTensor = tuple[str, tuple[int, ...], "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"]
"""dtype, shape, bytes: NumPy hands the bytes to Ray and to pickle's protocol 5 without a copy."""
_PLAIN = (str, int, float, bool, type(None))


def pack(batch: Columns | None, arrays: dict[str, Array], settings: dict[str, object]) -> State:
    tensors = (
        None if batch is None else {name: _pack_tensor(tensor) for name, tensor in batch.items()}
    )
    return FORMAT, tensors, 0 if batch is None else batch.num_rows, arrays, settings


def unpack(state: object) -> tuple[Columns | None, dict[str, Array], dict[str, object]]:
    """Return the parts of a batch again.

    Raises:
        BatchError: the state belongs to a different class of that name.
    """
    if not isinstance(state, tuple) or len(state) != 5 or state[0] != FORMAT:
        raise BatchError(
            "this pickled DataProto was written by the older generation, whose pickles run code: "
            "read it there, and hand over tensors with DataProto.from_dict or save_to_disk."
        )
    _, tensors, num_rows, arrays, settings = cast("State", state)
    if tensors is None:
        return None, arrays, settings
    return (
        Columns(
            {name: _unpack_tensor(packed) for name, packed in tensors.items()}, num_rows=num_rows
        ),
        arrays,
        settings,
    )


def write_file(
    path: str, batch: Columns | None, arrays: Mapping[str, Array], settings: Mapping[str, object]
) -> None:
    """Write a new file; see ``DataProto.save_to_disk``."""
    content = {
        "format": FORMAT,
        "num_rows": None if batch is None else batch.num_rows,
        "tensors": {
            name: tensor.detach().cpu().contiguous() for name, tensor in (batch or {}).items()
        },
        "arrays": {
            name: [str(array.dtype), _plain(array.tolist(), where=name)]
            for name, array in arrays.items()
        },
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
            f"{path} is no file of DataProto.save_to_disk, or a pickle of the older generation, "
            "which is not executed: read it there and write its tensors again."
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BatchError(f"{path} holds no DataProto of the format {FORMAT}.")
    num_rows = content["num_rows"]
    batch = None if num_rows is None else Columns(content["tensors"], num_rows=num_rows)
    return (
        batch,
        {name: _array(dtype, items) for name, (dtype, items) in content["arrays"].items()},
        content["meta_info"],
    )


def _pack_tensor(tensor: Tensor) -> PackedTensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return (
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        flat.view(torch.uint8).numpy(),
    )


def _unpack_tensor(packed: PackedTensor) -> Tensor:
    name, shape, data = packed
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BatchError(f"a packed tensor claims the dtype {name!r}, which torch does not have.")
    # Arrays in shared memory are read-only, and torch needs writable memory.
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
        raise BatchError(
            f"{where} is a {type(value).__name__}, which has no plain form: leave it out before "
            "saving."
        )
    return value
