"""Sets of weights: complete or refused, and a checksum of their bytes."""

import hashlib

import pytest
import torch

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import WeightEntry, check_weight_entries, hash_tensors


def entries(**shapes: tuple[int, ...]) -> list[WeightEntry]:
    return [
        WeightEntry(name=name, shape=shape, dtype=torch.float32) for name, shape in shapes.items()
    ]


def test_the_same_set_in_another_order_is_complete() -> None:
    check_weight_entries(entries(a=(2,), b=(3,)), entries(b=(3,), a=(2,)))


def test_every_fault_is_named() -> None:
    with pytest.raises(
        WeightError,
        match=r"b: shape \(3,\), expected \(4,\); missing a; unexpected c. Nothing was loaded",
    ):
        check_weight_entries(entries(a=(2,), b=(4,)), entries(b=(3,), c=(1,)))


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(WeightError, match=r"1 names came twice"):
        check_weight_entries(entries(a=(2,)), entries(a=(2,)) * 2)


def test_many_faults_are_counted() -> None:
    with pytest.raises(WeightError, match=r"missing w0; .*missing w4 and 2 more"):
        check_weight_entries(entries(**{f"w{i}": (1,) for i in range(7)}), [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_the_checksum_is_that_of_the_bytes(dtype: torch.dtype) -> None:
    one, two = torch.arange(6).view(2, 3).to(dtype), torch.tensor(1).to(dtype)
    raw = b"".join(
        bytes(t.contiguous().view(torch.uint8).flatten().tolist()) for t in (one, two.view(1))
    )
    assert hash_tensors([one, two]) == hashlib.sha256(raw).hexdigest()
    assert hash_tensors([one.t().contiguous().t(), two]) == hashlib.sha256(raw).hexdigest()
