"""``DataProto`` with the methods the deprecated workers use, under their old names."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from temper_engine_api.errors import BatchError
from temper_legacy_shim.data_proto.columns import (
    Array,
    Columns,
    State,
    concatenate,
    merged_arrays,
    merged_settings,
    merged_tensors,
    pack,
    read_file,
    unpack,
    write_file,
)

T = TypeVar("T")
Slice = slice
"""The builtin, which the method of that name hides inside the class."""
Index = Sequence[int] | Tensor | Array
"""Row indices, or a mask of all rows."""
Settings = dict[str, object]
"""Options and metrics of the batch."""


@dataclass
class DataProtoItem:
    batch: dict[str, Tensor] | None = None
    non_tensor_batch: dict[str, object] = field(default_factory=dict)
    meta_info: Settings = field(default_factory=dict)


@dataclass
class DataProto:
    """Tensors and other values with an entry per row, and a dictionary of settings."""

    batch: Columns | None = None
    """[B, ...] tensors by name; any mapping is taken, a TensorDict among them."""
    non_tensor_batch: dict[str, Array] = field(default_factory=dict)
    """[B, ...] NumPy arrays by name, often of Python objects."""
    meta_info: Settings = field(default_factory=dict)
    """Options going in, metrics coming out."""

    def __post_init__(self) -> None:
        given = cast("Mapping[str, Tensor] | None", self.batch)
        if given is not None and not isinstance(given, Columns):
            self.batch = Columns(dict(given.items()))
        self.check_consistency()

    def check_consistency(self) -> None:
        """Refuse columns of different lengths.

        Raises:
            BatchError: naming the column.
        """
        for name, array in cast("Mapping[str, object]", self.non_tensor_batch).items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise BatchError(
                    f"non-tensor column {name!r} must be a NumPy array with a batch dimension, but "
                    f"is {type(array).__name__}."
                )
            if len(array) != len(self):
                raise BatchError(
                    f"non-tensor column {name!r} has {len(array)} rows, but the batch has "
                    f"{len(self)}."
                )

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, object] | None = None,
        meta_info: Settings | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Build a batch from tensors and other values; each has one entry per row.

        Raises:
            BatchError: several batch dimensions, or ``auto_padding``, which the deprecated workers
                never used.
        """
        if num_batch_dims != 1 or auto_padding:
            raise BatchError(
                f"num_batch_dims is {num_batch_dims} and auto_padding {auto_padding}: this "
                "DataProto has one batch dimension, and is padded with pad_dataproto_to_divisor."
            )
        arrays = {name: _array(value) for name, value in (non_tensors or {}).items()}
        return cls(
            batch=Columns(tensors) if tensors else None,
            non_tensor_batch=arrays,
            meta_info=dict(meta_info or {}),
        )

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, object], meta_info: Settings | None = None
    ) -> "DataProto":
        """Return a batch from one mapping of tensors and arrays."""
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in data.items() if name not in tensors}
        return cls.from_dict(tensors=tensors, non_tensors=others, meta_info=meta_info)

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.num_rows
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: Slice | Index) -> "DataProto": ...

    def __getitem__(self, item: int | Slice | Index) -> "DataProtoItem | DataProto":
        if isinstance(item, int | np.integer):
            tensors = (
                None
                if self.batch is None
                else {name: column[int(item)] for name, column in self.batch.items()}
            )
            return DataProtoItem(
                tensors,
                {name: array[item] for name, array in self.non_tensor_batch.items()},
                self.meta_info,
            )
        if isinstance(item, Slice):
            batch = None if self.batch is None else self.batch.rows(item)
            return type(self)(
                batch,
                {name: array[item] for name, array in self.non_tensor_batch.items()},
                self.meta_info,
            )
        return self.select_idxs(item)

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> "DataProto":
        return self[Slice(start, end, step)]

    def select_idxs(self, idxs: Index) -> "DataProto":
        """Select rows by index, or by a mask of all rows."""
        index = torch.as_tensor(idxs) if len(idxs) else torch.empty(0, dtype=torch.long)
        batch = None if self.batch is None else self.batch.rows(index)
        chosen = index.numpy()
        return type(self)(
            batch,
            {name: array[chosen] for name, array in self.non_tensor_batch.items()},
            self.meta_info,
        )

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """Select columns and settings; None selects all of a kind."""
        batch = (
            self.batch
            if batch_keys is None or self.batch is None
            else self.batch.select(*batch_keys)
        )
        arrays = _chosen(self.non_tensor_batch, non_tensor_batch_keys)
        settings = _chosen(self.meta_info, meta_info_keys)
        if deepcopy:
            batch, arrays, settings = (
                None if batch is None else batch.clone(),
                copy.deepcopy(arrays),
                copy.deepcopy(settings),
            )
        return type(self)(batch, arrays, settings)

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> "DataProto":
        """Move columns and settings of this batch to a new batch."""
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        for name in batch_keys:
            assert self.batch is not None
            del self.batch[name]
        for name in non_tensor_batch_keys:
            del self.non_tensor_batch[name]
        for name in meta_info_keys:
            del self.meta_info[name]
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Rename tensor columns in place."""
        old, new = (
            [keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys)
        )
        if len(old) != len(new) or self.batch is None:
            raise BatchError(
                f"rename takes as many new names as old ones, of tensors that exist, but got {old} "
                f"and {new}."
            )
        self.batch.rename_key_(old, new)
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add another batch's columns and settings in place, and return this batch.

        Raises:
            BatchError: a name is in both with different contents, or the lengths differ; this batch
                is unchanged then.
        """
        batch = merged_tensors(self.batch, other.batch)
        arrays = merged_arrays(self.non_tensor_batch, other.non_tensor_batch)
        settings = merged_settings(self.meta_info, other.meta_info)
        self.batch, self.non_tensor_batch, self.meta_info = batch, arrays, settings
        self.check_consistency()
        return self

    def split(self, split_size: int) -> "list[DataProto]":
        """Split into pieces of ``split_size`` rows; the last may be shorter."""
        if split_size < 1:
            raise BatchError(f"split_size is {split_size}, but must be at least 1.")
        return [self[first : first + split_size] for first in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> "list[DataProto]":
        """Split into that many pieces of equal length.

        Raises:
            BatchError: the length does not divide; ``pad_dataproto_to_divisor`` pads it.
        """
        if chunks < 1 or len(self) % chunks:
            raise BatchError(
                f"{len(self)} rows do not divide into {chunks} equal chunks: use "
                "pad_dataproto_to_divisor before."
            )
        size = len(self) // chunks
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """Return the batches one below the other.

        ``meta_info["metrics"]`` of all of them become lists, other settings must agree.

        Raises:
            BatchError: no batch, or columns or settings that differ.
        """
        if not data:
            raise BatchError("there is no batch to concatenate.")
        parts = [d.batch for d in data if d.batch is not None]
        if len(parts) not in (0, len(data)):
            raise BatchError("some of the batches to concatenate have tensors and some have none.")
        arrays = {
            name: np.concatenate([d.non_tensor_batch[name] for d in data])
            for name in _same_names(data)
        }
        return type(data[0])(
            concatenate(parts) if parts else None,
            arrays,
            _joined_settings([d.meta_info for d in data]),
        )

    def reorder(self, indices: Tensor) -> None:
        other = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Return every row that many times, next to each other or the batch as a whole."""
        rows = torch.arange(len(self))
        return self.select_idxs(
            rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)
        )

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Repeat the first row (``"first"``) or the last one at the end, in place."""
        last = 0 if padding_candidate == "first" else len(self) - 1
        padded = self.select_idxs([*range(len(self)), *[last] * padding_size])
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, object] | None = None,
    ) -> "Iterator[DataProto]":
        """Yield mini-batches of the full batch, ``epochs`` times.

        Shuffled where ``dataloader_kwargs`` has ``shuffle=True``.

        Raises:
            BatchError: the length does not divide, or another loader option.
        """
        options = dict(dataloader_kwargs or {})
        shuffles = bool(options.pop("shuffle", False))
        if options or mini_batch_size < 1 or len(self) % mini_batch_size:
            raise BatchError(
                f"make_iterator takes a mini_batch_size that divides {len(self)} rows (it is "
                f"{mini_batch_size}) and no loader option but shuffle (given: {sorted(options)})."
            )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        # The loader draws a number of its own before it shuffles: the order of a seed is the old
        # one only with it.
        rows: DataLoader[int] = DataLoader(
            range(len(self)),  # type: ignore[arg-type]  # anything with a length and items
            batch_size=mini_batch_size,
            shuffle=shuffles,
            generator=generator,
            collate_fn=list,
        )
        for _ in range(epochs):
            for chosen in rows:
                yield self.select_idxs(chosen)

    def to(self, device: torch.device | str) -> "DataProto":
        """Move the tensors, in place; returns this batch."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def __getstate__(self) -> State:
        return pack(self.batch, self.non_tensor_batch, self.meta_info)

    def __setstate__(self, state: object) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = unpack(state)

    def save_to_disk(self, filepath: str) -> None:
        """Write the batch to a new file that ``load_from_disk`` reads without a pickle.

        Raises:
            BatchError: a value has no plain form; it is named.
            FileExistsError: the file exists.
        """
        write_file(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load_from_disk(filepath: str) -> "DataProto":
        """Load a file of ``save_to_disk``.

        Raises:
            BatchError: something else, such as a pickle of the older generation, which is not
                executed.
        """
        return DataProto(*read_file(filepath))


def _array(value: object) -> Array:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise BatchError(
            "a non-tensor column must be a NumPy array or a list with an entry a row, but is a "
            f"{type(value).__name__}."
        )
    items = list(value)
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def _chosen(values: dict[str, T], names: Sequence[str] | None) -> dict[str, T]:
    return dict(values) if names is None else {name: values[name] for name in names}


def _same_names(data: Sequence[DataProto]) -> list[str]:
    names = set(data[0].non_tensor_batch)
    for other in data[1:]:
        if set(other.non_tensor_batch) != names:
            result = sorted(other.non_tensor_batch)
            raise BatchError(
                f"batches with different non-tensor columns can't be concatenated: {sorted(names)} "
                f"against {result}."
            )
    return sorted(names)


def _joined_settings(parts: Sequence[Settings]) -> Settings:
    """Merge the dictionaries of settings, which must agree; metrics become lists."""
    joined: Settings = {}
    metrics: list[dict[str, object]] = []
    for part in parts:
        result = part.get("metrics")
        metrics += (
            result
            if isinstance(result, list)
            else [cast("dict[str, object]", result)]
            if result is not None
            else []
        )
        joined = merged_settings(
            joined, {name: value for name, value in part.items() if name != "metrics"}
        )
    if metrics:
        joined["metrics"] = _lists_of(metrics)
    return joined


def _lists_of(metrics: Sequence[dict[str, object]]) -> dict[str, list[object]]:
    lists: dict[str, list[object]] = {name: [] for name in metrics[0]}
    for part in metrics:
        for name, value in part.items():
            if name not in lists:
                raise BatchError(
                    f"metric {name!r} is reported by a later batch, but not by the first: report "
                    "the same ones everywhere."
                )
            lists[name].append(value)
    return lists


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat first rows at the end until ``size_divisor`` divides the length.

    Return the batch and the number of added rows.

    Raises:
        BatchError: the batch is empty, so there is no row to repeat.
    """
    if size_divisor < 1:
        raise BatchError(f"size_divisor is {size_divisor}, but must be at least 1.")
    missing = -len(data) % size_divisor
    if missing == 0:
        return data, 0
    if len(data) == 0:
        raise BatchError("an empty batch can't be padded: there is no row to repeat.")
    rows = [i % len(data) for i in range(missing)]
    return DataProto.concat([data, data.select_idxs(rows)]), missing


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the last ``pad_size`` entries."""
    return data if pad_size == 0 else data[:-pad_size]
