"""Weights cut into buckets and back: complete, in order, unharmed, owned."""

from dataclasses import replace

import pytest
import torch

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight
from temper_trainer.weight_sync.buckets import pack_buckets, unpack_buckets


def weights() -> list[NamedWeight]:
    return [
        NamedWeight(f"w{i}", torch.full((i + 1, 4), float(i))) for i in range(4)
    ]  # 16, 32, 48 and 64 bytes


def test_unpacked_bucket_equals_the_packed_tensors() -> None:
    buckets = list(pack_buckets(weights(), bucket_bytes=50))
    assert [len(bucket.entries) for bucket in buckets] == [
        2,
        1,
        1,
    ]  # 16 + 32 fit into 50; 48; 64 alone, though larger
    assert [bucket.is_last for bucket in buckets] == [False, False, True]
    back = list(unpack_buckets(buckets))
    assert [w.name for w in back] == ["w0", "w1", "w2", "w3"]
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(back, weights(), strict=True))


def test_bucket_owns_its_tensors() -> None:
    parameter = torch.zeros(4)
    (bucket,) = pack_buckets([NamedWeight("w", parameter)], bucket_bytes=100)
    parameter.fill_(1.0)
    assert torch.equal(bucket.tensors[0], torch.zeros(4))


def test_views_are_packed_with_their_elements_only() -> None:
    view = torch.arange(6.0).reshape(2, 3).t()
    (back,) = unpack_buckets(pack_buckets([NamedWeight("w", view)], bucket_bytes=100))
    assert torch.equal(back.tensor, view)


def test_changed_byte_is_refused() -> None:
    first, *rest = pack_buckets(weights(), bucket_bytes=50)
    first.tensors[0][0, 0] += 1.0
    with pytest.raises(WeightError, match="bucket 0 arrived damaged"):
        list(unpack_buckets([first, *rest]))


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        ([0, 2], "bucket 2 arrived, but bucket 1 was expected"),
        ([1, 0, 2], "bucket 1 arrived, but bucket 0 was expected"),
        ([0, 1], "the last bucket is missing"),
    ],
)
def test_missing_and_misplaced_buckets_are_refused(order: list[int], sentence: str) -> None:
    buckets = list(pack_buckets(weights(), bucket_bytes=50))
    with pytest.raises(WeightError, match=sentence):
        list(unpack_buckets([buckets[i] for i in order]))


def test_buckets_after_the_last_are_refused() -> None:
    (only,) = pack_buckets(weights(), bucket_bytes=1000)
    with pytest.raises(WeightError, match="bucket 1 arrived, but bucket 1 was expected"):
        list(unpack_buckets([only, replace(only, index=1)]))
