"""Buckets of weights as files, and over a channel."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.distributed.rendezvous import StoreServer
from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    check_digest,
    compute_digest,
    open_weight_file,
    pack_tensors,
    plan_layout,
    split_into_buckets,
    unpack_tensors,
    write_weight_file,
)
from temper_trainer.rollout.weight_channel import ChannelSpec, WeightChannel

WEIGHTS = [
    NamedWeight("a", torch.arange(6, dtype=torch.float32).view(2, 3)),
    NamedWeight("b", torch.randn(5, dtype=torch.bfloat16)),
    NamedWeight("c", torch.tensor(3, dtype=torch.int64)),
    NamedWeight("d", torch.randn(4, 7)[:, ::2]),  # not contiguous
]


def assert_equal(actual: list[NamedWeight], expected: list[NamedWeight]) -> None:
    assert [weight.name for weight in actual] == [weight.name for weight in expected]
    for one, other in zip(actual, expected, strict=True):
        assert one.tensor.dtype == other.tensor.dtype
        assert torch.equal(one.tensor, other.tensor)


def test_weight_file_contains_its_tensors_bit_for_bit(tmp_path: Path) -> None:
    weight_file = write_weight_file(WEIGHTS, tmp_path / "p", with_digest=True)
    data = open_weight_file(weight_file)
    check_digest(data, weight_file)
    assert_equal(list(unpack_tensors(data, weight_file)), WEIGHTS)


def test_single_changed_bit_is_found(tmp_path: Path) -> None:
    weight_file = write_weight_file(WEIGHTS, tmp_path / "p", with_digest=True)
    data = open_weight_file(weight_file).clone()
    for position in (0, 17, len(data) - 1):
        changed = data.clone()
        changed[position] ^= 128
        with pytest.raises(WeightError, match="starts with a arrived damaged"):
            check_digest(changed, weight_file)


def test_missing_or_truncated_weight_file_is_named(tmp_path: Path) -> None:
    weight_file = write_weight_file(WEIGHTS, tmp_path / "p", with_digest=False)
    os.truncate(tmp_path / "p", 8)
    with pytest.raises(WeightError, match=r"p has 8 bytes, but \d+ bytes were expected"):
        open_weight_file(weight_file)
    with pytest.raises(WeightError, match="is missing"):
        open_weight_file(replace(weight_file, path=str(tmp_path / "q")))


def test_full_memory_is_reported_and_leaves_no_file(tmp_path: Path) -> None:
    # A sparse tensor of more bytes than any file may have: only its size is looked at.
    huge = NamedWeight("huge", torch.empty(1, dtype=torch.uint8).expand(1 << 62))
    with pytest.raises(
        WeightError, match=r"bytes of weights don't fit into .*Give shared memory more room"
    ):
        write_weight_file([huge], tmp_path / "p", with_digest=False)
    assert not (tmp_path / "p").exists()


@given(sizes=st.lists(st.integers(1, 50), max_size=20), bucket=st.integers(1, 400))
def test_chunks_are_complete_ordered_and_bounded(sizes: list[int], bucket: int) -> None:
    weights = [NamedWeight(str(i), torch.zeros(size)) for i, size in enumerate(sizes)]
    parts = list(split_into_buckets(weights, bucket_bytes=bucket))
    assert [weight.name for part in parts for weight in part] == [weight.name for weight in weights]
    assert all(
        len(part) == 1 or sum(w.tensor.numel() * 4 for w in part) <= bucket for part in parts
    )


def test_swapped_blocks_have_another_digest() -> None:
    data = torch.arange(1 << 23, dtype=torch.int64).view(torch.uint8)[: 3 << 22]
    half = len(data) // 2
    assert compute_digest(data) != compute_digest(torch.cat([data[half:], data[:half]]))
    assert compute_digest(data) == compute_digest(data.clone())


def test_digest_is_the_sum_of_words_weighted_by_their_position() -> None:
    block = 1 << 19
    words = torch.zeros(3 * block + 7, dtype=torch.int64)
    words[0], words[1], words[2 * block + 4], words[3 * block + 6] = 2, -3, 5, 11
    data = torch.cat([words.view(torch.uint8), torch.tensor([9, 0, 1], dtype=torch.uint8)])
    # Place p of block b weighs (2p + 1)(2b + 1); what is less than a word counts as one, little end
    # first; the length is added.
    expected = 2 * 1 * 1 - 3 * 3 * 1 + 5 * 9 * 5 + 11 * 13 * 7 + (9 + (1 << 16)) + len(data)
    assert compute_digest(data) == expected


@pytest.mark.parametrize("with_digest", [True, False])
def test_broadcast_sends_every_bucket_to_every_receiver(with_digest: bool) -> None:
    parts = list(split_into_buckets(WEIGHTS, bucket_bytes=40))
    weight_files = [
        PackedBucket(entries=plan_layout(part)[0], num_bytes=plan_layout(part)[1], digest=None)
        for part in parts
    ]
    largest = max(weight_file.num_bytes for weight_file in weight_files)
    # As in a run, the store listens before a receiver gets its address.
    server = StoreServer("127.0.0.1", token="secret")
    spec = ChannelSpec(
        backend="gloo",
        address="127.0.0.1",
        port=server.port,
        token="secret",
        size=3,
        buffer_bytes=largest,
        with_digest=with_digest,
        timeout_s=60,
    )
    received: dict[int, list[NamedWeight]] = {1: [], 2: []}

    def receive(rank: int) -> None:
        channel = WeightChannel(replace(spec, rank=rank), device=torch.device("cpu"))
        for weight_file in weight_files:
            received[rank] += [
                NamedWeight(n, t.clone())
                for n, t in unpack_tensors(channel.receive(weight_file), weight_file)
            ]

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in received]
    for thread in threads:
        thread.start()
    channel = WeightChannel(spec, device=torch.device("cpu"), server=server)
    for part, weight_file in zip(parts, weight_files, strict=True):
        data = channel.get_bucket_buffer(weight_file.num_bytes)
        pack_tensors(data, part, weight_file.entries)
        channel.send(data)
    for thread in threads:
        thread.join(60)
    assert_equal(received[1], WEIGHTS)
    assert_equal(received[2], WEIGHTS)
