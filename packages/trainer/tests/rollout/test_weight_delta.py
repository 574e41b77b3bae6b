"""Test deltas of buckets: a bucket with its delta is the next bucket, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout import weight_delta
from temper_trainer.rollout.packed_bucket import compute_digest, plan_layout
from temper_trainer.rollout.weight_delta import (
    FULL_TENSOR,
    DeltaBucket,
    apply_delta,
    check_delta_buckets,
    check_updated_bucket,
    compute_delta,
    compute_tensors_digest,
    count_delta_bytes,
    count_sent_elements,
    open_delta_file,
    pack_delta,
    unpack_delta,
    write_delta_file,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def carried(
    cached: list[Tensor], now: list[Tensor], *, max_changed_fraction: float = 0.25
) -> tuple[tuple[int, ...], Tensor]:
    """Compute the delta, apply it to ``cached``, and return counts and bytes."""
    part = [NamedWeight(f"w{i}", tensor) for i, tensor in enumerate(now)]
    entries, _ = plan_layout(part)
    changes = compute_delta(part, cached, max_changed_fraction=max_changed_fraction)
    counts = tuple(change.count for change in changes)
    data = torch.full((count_delta_bytes(entries, counts),), 7, dtype=torch.uint8)
    pack_delta(data, changes, entries)
    apply_delta(cached, data, entries, counts)
    return counts, data


@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=4),
    fraction=st.floats(0, 1),
    max_changed_fraction=st.floats(0, 1),
)
def test_bucket_with_its_delta_equals_the_next_bucket(
    seed: int,
    dtype: torch.dtype,
    shapes: list[list[int]],
    fraction: float,
    max_changed_fraction: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def some(shape: list[int]) -> Tensor:
        return (
            torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
            .view(dtype)
            .view(shape)
        )

    before = [some(shape) for shape in shapes]
    now = [
        torch.where(torch.rand(shape, generator=generator) < fraction, some(shape), old)
        for shape, old in zip(shapes, before, strict=True)
    ]
    cached = [tensor.clone() for tensor in before]
    counts, data = carried(cached, now, max_changed_fraction=max_changed_fraction)
    assert [bits(tensor) for tensor in cached] == [bits(tensor) for tensor in now]
    for count, tensor in zip(counts, now, strict=True):
        assert count == FULL_TENSOR or count <= max_changed_fraction * tensor.numel()
    full_bytes = plan_layout([NamedWeight(f"w{i}", tensor) for i, tensor in enumerate(now)])[1]
    assert len(data) <= full_bytes, (
        "changes never take more than the bucket that they are changes of: the channel's buffer is "
        "that large"
    )


def test_minus_zero_and_nan_bits_are_part_of_a_delta() -> None:
    before = torch.zeros(100)
    now = before.clone()
    now[3] = -0.0
    now.view(torch.int32)[5] = 0x7FC00123
    cached = [before.clone()]
    counts, _ = carried(cached, [now])
    assert counts == (2,)
    assert bits(cached[0]) == bits(now)


@pytest.mark.parametrize(("num_changed", "count"), [(0, 0), (25, 25), (26, FULL_TENSOR)])
def test_tensor_with_too_many_changes_is_sent_in_full(num_changed: int, count: int) -> None:
    # A quarter of 100 elements is 25. Changes of 25: 128 bytes of places and 128 of values; the
    # tensor itself has 400.
    now = torch.zeros(100)
    now[:num_changed] = 1.0
    counts, data = carried([torch.zeros(100)], [now], max_changed_fraction=0.25)
    assert counts == (count,)
    assert len(data) == {0: 0, 25: 256, FULL_TENSOR: 448}[count]


def test_tensor_whose_delta_would_be_larger_is_sent_in_full() -> None:
    # One changed element takes two times 64 bytes, the tensor of 8 floats 32, in a place of 64.
    counts, data = carried([torch.zeros(8)], [torch.eye(8)[0]], max_changed_fraction=1.0)
    assert counts == (FULL_TENSOR,)
    assert len(data) == 64


def test_changes_beyond_one_block_of_the_comparison_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_delta, "_BLOCK", 10)
    now = torch.zeros(100)
    now[[0, 9, 10, 55, 99]] = 1.0
    cached = [torch.zeros(100)]
    assert carried(cached, [now])[0] == (5,)
    assert cached[0].equal(now)


def test_delta_of_a_noncontiguous_view_covers_its_elements() -> None:
    now = torch.zeros(10, 20)
    now[3, 4] = 1.0
    cached = [torch.zeros(20, 10)]
    assert carried(cached, [now.t()])[0] == (1,)
    assert cached[0].equal(now.t())


def test_index_outside_its_tensor_is_refused() -> None:
    now = torch.zeros(100)
    now[7] = 1.0
    part = [NamedWeight("w", now)]
    entries, _ = plan_layout(part)
    changes = compute_delta(part, [torch.zeros(100)], max_changed_fraction=0.5)
    data = torch.zeros(count_delta_bytes(entries, [1]), dtype=torch.uint8)
    pack_delta(data, changes, entries)
    for wrong in (-1, 100):
        data[:4].view(torch.int32)[0] = wrong
        with pytest.raises(WeightError, match="the delta of w has indices outside"):
            list(unpack_delta(data, entries, [1]))


def test_delta_to_another_base_is_found_by_the_checksum_of_its_result(tmp_path: Path) -> None:
    before, now = [torch.zeros(100)], torch.zeros(100)
    now[7] = 1.0
    part = [NamedWeight("w", now)]
    entries, _ = plan_layout(part)
    changes = compute_delta(part, before, max_changed_fraction=0.5)
    delta_file = write_delta_file(part, changes, entries, tmp_path / "c", with_digest=True)
    for other, fits in ((torch.zeros(100), True), (torch.ones(100), False)):
        apply_delta([other], open_delta_file(delta_file), entries, delta_file.counts)
        if fits:
            check_updated_bucket([other], delta_file.updated_digest, version=2, base_version=1)
        else:
            with pytest.raises(
                WeightError, match="a bucket of weights 1 plus its delta differs from weights 2"
            ):
                check_updated_bucket([other], delta_file.updated_digest, version=2, base_version=1)


def test_damaged_delta_file_is_refused(tmp_path: Path) -> None:
    now = torch.zeros(100)
    now[7] = 1.0
    part = [NamedWeight("w", now)]
    entries, _ = plan_layout(part)
    delta_file = write_delta_file(
        part,
        compute_delta(part, [torch.zeros(100)], max_changed_fraction=0.5),
        entries,
        tmp_path / "c",
        with_digest=True,
    )
    assert count_sent_elements(entries, delta_file.counts) == 1
    content = bytearray((tmp_path / "c").read_bytes())
    content[70] ^= 1
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(WeightError, match="arrived damaged"):
        open_delta_file(delta_file)


def test_unchanged_weights_write_no_file(tmp_path: Path) -> None:
    part = [NamedWeight("w", torch.zeros(100))]
    entries, _ = plan_layout(part)
    delta_file = write_delta_file(
        part,
        compute_delta(part, [torch.zeros(100)], max_changed_fraction=0.5),
        entries,
        tmp_path / "c",
        with_digest=True,
    )
    assert (delta_file.num_bytes, delta_file.path, list(tmp_path.iterdir())) == (0, None, [])
    assert len(open_delta_file(delta_file)) == 0


def test_checksum_depends_on_the_order_of_tensors() -> None:
    one, other = torch.arange(5.0), torch.arange(7.0)
    assert compute_tensors_digest([one, other]) != compute_tensors_digest([other, one])


def test_checksum_of_a_view_covers_its_elements() -> None:
    full_bytes = torch.arange(20, dtype=torch.bfloat16)
    for view in (full_bytes[3:14], full_bytes[::2], full_bytes.view(4, 5).t(), full_bytes[3]):
        assert compute_tensors_digest([view]) == compute_tensors_digest([view.clone()])


def test_missing_misplaced_or_damaged_delta_buckets_are_refused() -> None:
    part = [NamedWeight("w", torch.zeros(100))]
    data = torch.arange(64, dtype=torch.uint8)
    first = DeltaBucket(
        index=0,
        is_last=False,
        entries=plan_layout(part)[0],
        counts=(0,),
        data=data,
        digest=compute_digest(data),
    )
    last = replace(first, index=1, is_last=True)
    check_delta_buckets([first, last])
    for wrong in ([], [first], [last], [last, first], [first, first, last]):
        with pytest.raises(WeightError, match="not all of them in order"):
            check_delta_buckets(wrong)
    with pytest.raises(WeightError, match="bucket 1 arrived damaged"):
        check_delta_buckets([first, replace(last, data=data.flip(0))])
