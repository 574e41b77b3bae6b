"""Element types by their names in torch, in safetensors and in numpy; casts that numpy lacks.

numpy has no bfloat16 and no float8: their elements travel as unsigned integers of the same width, and only casts look inside.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from temper_legacy_shim.errors import UsageError

Block = NDArray[np.generic]
"""Rows of a tensor in the container of its dtype."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """One element type."""

    name: str
    """torch's, such as ``bfloat16``."""
    tag: str
    """safetensors', such as ``BF16``."""
    container: np.dtype[np.generic]
    """What numpy holds it in."""
    is_float: bool = False
    """Whether it can hold NaN and infinity."""

    @property
    def num_bytes(self) -> int:
        """Of one element."""
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
BY_NAME = {name: Dtype(name, tag, np.dtype(container), is_float) for name, tag, container, is_float, _ in _TABLE}
BY_TAG = {dtype.tag: dtype for dtype in BY_NAME.values()}
BY_STORAGE = {storage: BY_NAME[name] for name, _, _, _, storage in _TABLE if storage}
FLOAT32 = BY_NAME["float32"]
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
SMALLEST_FLOAT32 = float(np.finfo(np.float32).tiny)
"""Above 0, of full precision."""
_CACHED = 1 << 16
CASTS = ("float32", "bfloat16", "float16")
"""What ``--dtype`` takes."""


def to_float32(block: Block, dtype: Dtype) -> NDArray[np.float32]:
    """The numbers of a floating block, exactly (float64 rounded)."""
    if dtype.name == "bfloat16":
        return (block.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if not dtype.is_float:
        raise UsageError(f"a tensor of {dtype.name} can't be converted to floating point.")
    with np.errstate(all="ignore"):  # what grows too large becomes infinite and is told at the end
        return block.astype(np.float32, copy=False)


def from_float32(block: NDArray[np.float32], dtype: Dtype) -> Block:
    """Round to nearest, ties to even, as torch does; NaN stays NaN."""
    if dtype.name != "bfloat16":
        with np.errstate(all="ignore"):  # as above
            return block.astype(dtype.container, copy=False)
    rounded = round_to_bfloat16(block)
    if has_nan(block, FLOAT32):
        bits = np.ascontiguousarray(block).reshape(block.shape).view(np.uint32)
        quiet = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
        rounded = np.where(np.isnan(block), quiet, rounded)
    return rounded


def round_to_bfloat16(block: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round numbers to nearest, ties to even; of NaN this may make anything."""
    bits = np.ascontiguousarray(block).reshape(-1).view(np.uint32)
    rounded = np.empty(bits.shape, np.uint16)
    held = np.empty(min(_CACHED, bits.size), np.uint32)
    for start in range(0, bits.size, _CACHED):  # a stretch at a time, so that the passes over it stay in the processor's cache
        part = bits[start : start + _CACHED]
        carry = held[: part.size]
        np.right_shift(part, np.uint32(16), out=carry)
        carry &= np.uint32(1)
        carry += np.uint32(0x7FFF)
        carry += part
        carry >>= np.uint32(16)
        np.copyto(rounded[start : start + _CACHED], carry, casting="unsafe")  # twice as fast as every other element of a view
    return rounded.reshape(block.shape)


def has_nan(block: Block, dtype: Dtype) -> bool:
    """Whether a floating block holds NaN."""
    if block.size == 0:
        return False
    if dtype.name == "bfloat16":
        # Of positive patterns NaN are the largest, and of all patterns the negative NaN: two maxima, and nothing is allocated.
        return bool(block.view(np.int16).max() > 0x7F80 or block.view(np.uint16).max() > 0xFF80)
    if dtype.name == "float32":
        return not has_finite_squares(block.view(np.float32)) and bool(np.isnan(block).any())
    return dtype.is_float and bool(np.isnan(block).any())


def has_nonfinite(block: Block, dtype: Dtype) -> bool:
    """Whether a floating block holds NaN or infinity."""
    if block.size == 0:
        return False
    if dtype.name == "bfloat16":
        # As above; infinity is the pattern just below NaN.
        return bool(block.view(np.int16).max() >= 0x7F80 or block.view(np.uint16).max() >= 0xFF80)
    if dtype.name == "float32" and has_finite_squares(block.view(np.float32)):
        return False
    return dtype.is_float and not bool(np.isfinite(block).all())


def has_finite_squares(block: NDArray[np.float32]) -> bool:
    """Whether the squares have a finite sum: then nothing is NaN, infinite, or so large (1e19) that a cast to bfloat16 would make it so.

    One pass without a copy; where it is False, every element is to be looked at.
    """
    flat = block.reshape(-1)
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.dot(flat, flat)))
