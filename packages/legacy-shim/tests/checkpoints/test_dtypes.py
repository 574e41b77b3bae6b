"""Casts agree with torch's, bit for bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_legacy_shim.checkpoints.files.dtypes import (
    BY_NAME,
    from_float32,
    has_nonfinite,
    to_float32,
)

BF16 = BY_NAME["bfloat16"]


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_bfloat16_is_rounded_as_torch_rounds_it(bits: list[int]) -> None:
    numbers = np.array(bits, np.uint32).view(np.float32)
    target = torch.from_numpy(from_float32(numbers, BF16).view(np.int16)).view(torch.bfloat16)
    other = torch.from_numpy(numbers).to(torch.bfloat16)
    same = target.view(torch.int16) == other.view(torch.int16)
    assert bool((same | (target.isnan() & other.isnan())).all())


@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=64))
def test_bfloat16_becomes_float32_exactly(bits: list[int]) -> None:
    numbers = np.array(bits, np.uint16)
    other = torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(to_float32(numbers, BF16), other)
    assert has_nonfinite(numbers, BF16) == (not np.isfinite(other).all())


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("value", [1.0, 6e4, math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_and_large_numbers_are_not(dtype: str, value: float) -> None:
    block = np.array([[1.0, value], [0.0, 2.0]], BY_NAME[dtype].container)
    assert has_nonfinite(block, BY_NAME[dtype]) == (not math.isfinite(value))
    largest = np.full((3, 3), np.finfo(block.dtype).max, block.dtype)
    assert not has_nonfinite(largest, BY_NAME[dtype])
    assert not has_nonfinite(block[:0], BY_NAME[dtype])


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_nan_keeps_the_shape(shape: tuple[int, ...]) -> None:
    assert from_float32(np.full(shape, math.nan, np.float32), BF16).shape == shape
