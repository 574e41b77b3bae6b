"""Element types of torch, safetensors and numpy by name, and casts between them.

Numpy has no bfloat16 and no float8: their elements travel as unsigned integers of the same width,
and only casts look inside, with the bfloat16 of ml_dtypes.
"""

from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from temper_legacy_shim.errors import UsageError

Block = NDArray[np.generic]
"""Rows of a tensor, as numpy stores the dtype."""


@dataclass(frozen=True, slots=True)
class Dtype:
    name: str
    """torch's, such as ``bfloat16``."""
    tag: str
    """safetensors', such as ``BF16``."""
    container: np.dtype[np.generic]
    """Type of the numpy array that holds it."""
    is_float: bool = False
    """True if it can hold NaN and infinity."""

    @property
    def num_bytes(self) -> int:
        return self.container.itemsize


_TABLE = (
    ("float64", "F64", "<f8", True, "DoubleStorage"),
    ("float32", "F32", "<f4", True, "FloatStorage"),
    ("float16", "F16", "<f2", True, "HalfStorage"),
    ("bfloat16", "BF16", "<u2", True, "BFloat16Storage"),
    ("float8_e4m3fn", "F8_E4M3", "u1", False, ""),
    ("float8_e5m2", "F8_E5M2", "u1", False, ""),
    ("float8_e8m0fnu", "F8_E8M0", "u1", False, ""),
    ("int64", "I64", "<i8", False, "LongStorage"),
    ("int32", "I32", "<i4", False, "IntStorage"),
    ("int16", "I16", "<i2", False, "ShortStorage"),
    ("int8", "I8", "i1", False, "CharStorage"),
    ("uint8", "U8", "u1", False, "ByteStorage"),
    ("uint16", "U16", "<u2", False, ""),
    ("uint32", "U32", "<u4", False, ""),
    ("uint64", "U64", "<u8", False, ""),
    ("bool", "BOOL", "u1", False, "BoolStorage"),
    ("complex64", "C64", "<c8", False, ""),
)
BY_NAME = {
    name: Dtype(name, tag, np.dtype(container), is_float)
    for name, tag, container, is_float, _ in _TABLE
}
BY_TAG = {dtype.tag: dtype for dtype in BY_NAME.values()}
BY_STORAGE = {storage: BY_NAME[name] for name, _, _, _, storage in _TABLE if storage}
FLOAT32 = BY_NAME["float32"]
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)
"""Above 0, of full precision."""
CASTS = ("float32", "bfloat16", "float16")
"""Values of ``--dtype``."""


def to_float32(block: Block, dtype: Dtype) -> NDArray[np.float32]:
    """Return the numbers of a floating block, exactly (float64 rounded)."""
    if dtype.name == "bfloat16":
        exact: NDArray[np.float32] = block.view(bfloat16).astype(np.float32)
        return exact
    if not dtype.is_float:
        raise UsageError(f"a tensor of {dtype.name} can't be converted to floating point.")
    with np.errstate(all="ignore"):  # what grows too large becomes infinite and is told at the end
        return block.astype(np.float32, copy=False)


def from_float32(block: NDArray[np.float32], dtype: Dtype) -> Block:
    """Round to nearest, ties to even, as torch does; NaN stays NaN."""
    with np.errstate(all="ignore"):  # as above
        if dtype.name == "bfloat16":
            return block.astype(bfloat16).view(np.uint16)
        return block.astype(dtype.container, copy=False)


def has_nonfinite(block: Block, dtype: Dtype) -> bool:
    """Check if a floating block holds NaN or infinity."""
    if block.size == 0:
        return False
    if dtype.name == "bfloat16":
        # Infinity is the largest positive pattern but NaN's, and of all patterns the largest but
        # negative NaN's: two maxima, no copy.
        return bool(block.view(np.int16).max() >= 0x7F80 or block.view(np.uint16).max() >= 0xFF80)
    if dtype.name == "float32" and _has_finite_squares(block.view(np.float32)):
        return False
    return dtype.is_float and not bool(np.isfinite(block).all())


def _has_finite_squares(block: NDArray[np.float32]) -> bool:
    """Check if the sum of squares is finite, which excludes NaN and infinity without a copy."""
    flat = block.reshape(-1)
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.dot(flat, flat)))
