"""Two mappings as one, where a name in both must mean the same."""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from torch import Tensor

from temper_engine_api.errors import BatchError
from temper_legacy_shim.data_proto.columns import Columns

T = TypeVar("T")
Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def merged_tensors(first: Columns | None, second: Columns | None) -> Columns | None:
    """Columns of both.

    Raises:
        BatchError: a column differs, or the lengths do.
    """
    if first is None or second is None:
        return second if first is None else first
    if first.num_rows != second.num_rows:
        raise BatchError(f"batches of {first.num_rows} and {second.num_rows} rows can't be united.")
    return Columns(_merged(first, second, what="tensor"), num_rows=first.num_rows)


def merged_arrays(first: Mapping[str, Array], second: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays of both.

    Raises:
        BatchError: an array differs.
    """
    return _merged(first, second, what="non-tensor")


def merged_settings(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    """Settings of both.

    Raises:
        BatchError: a setting differs.
    """
    return _merged(first, second, what="meta_info")


def _merged(first: Mapping[str, T], second: Mapping[str, T], *, what: str) -> dict[str, T]:
    for name in sorted(first.keys() & second.keys()):
        if not is_same(first[name], second[name]):
            raise BatchError(f"{what} entry {name!r} is in both batches with different contents: drop or rename one of them.")
    return {**first, **second}


def is_same(a: object, b: object) -> bool:
    """Whether two values hold the same, NaN being itself; tensors, arrays and containers are compared by content."""
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
        return type(a) is type(b) and len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    return bool(a == b)
