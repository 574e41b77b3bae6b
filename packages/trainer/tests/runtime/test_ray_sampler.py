"""Test weights sent through Ray's object store: one copy per tensor between engine and sampler."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.runtime.ray.ray_sampler import StoredBucket, hand_over_weights
from temper_trainer.runtime.worker_group import TrainingWorker

WEIGHTS = {
    "small": torch.arange(6.0).reshape(2, 3),
    "large": torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "one": torch.tensor(3.0),
}
BUCKET_BYTES = 64
"""Less than the large tensor's."""


class Worker:
    """A rank with four weights."""

    def __init__(self, *, is_first: bool = True) -> None:
        self.is_first = is_first
        self.seen: list[str] = []

    def export_weights(self) -> WeightStream:
        def weights() -> Iterator[NamedWeight]:
            for name, tensor in WEIGHTS.items():
                self.seen.append(name)
                yield NamedWeight(name, tensor)

        return WeightStream(weights())


def given_by(worker: Worker) -> list[StoredBucket]:
    return cast(
        "list[StoredBucket]",
        list(
            hand_over_weights(
                cast("TrainingWorker", worker), lambda bucket: bucket, BUCKET_BYTES, True
            ).refs
        ),
    )


def test_sent_buckets_use_the_engines_memory() -> None:
    buckets = given_by(Worker())
    assert [[entry.name for entry in bucket.entries] for bucket in buckets] == [
        ["small"],
        ["large"],
        ["turned", "one"],
    ]
    assert np.shares_memory(buckets[1].arrays[0], WEIGHTS["large"].view(torch.uint8).numpy())


def test_received_weights_equal_the_sent_ones() -> None:
    arrived = {
        name: tensor for bucket in given_by(Worker()) for name, tensor in bucket.unpack_weights()
    }
    assert arrived.keys() == WEIGHTS.keys()
    assert all(
        arrived[name].equal(tensor) and arrived[name].dtype == tensor.dtype
        for name, tensor in WEIGHTS.items()
    )


def test_changed_byte_is_refused() -> None:
    (_, bucket, _) = given_by(Worker())
    (array,) = bucket.arrays
    damaged = StoredBucket(
        index=1,
        entries=bucket.entries,
        arrays=(array ^ (np.arange(len(array)) == 7),),
        digests=bucket.digests,
    )
    with pytest.raises(WeightError, match="large arrived damaged"):
        damaged.unpack_weights()


def test_other_ranks_take_part_in_gathering_and_send_nothing() -> None:
    worker = Worker(is_first=False)
    assert given_by(worker) == []
    assert worker.seen == list(WEIGHTS)


def test_error_while_sending_leaves_no_rank_waiting() -> None:
    def fails(bucket: StoredBucket) -> None:
        raise MemoryError("no room")

    worker = Worker()
    with pytest.raises(MemoryError, match="no room"):
        hand_over_weights(cast("TrainingWorker", worker), fails, BUCKET_BYTES, True)
    assert worker.seen == list(WEIGHTS)


def is_in_shared_memory(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's bytes are in a mapped file of the object store."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        begin, end = (int(word, 16) for word in span.split("-"))
        if begin <= tensor.data_ptr() < end:
            return "plasma" in name or "/dev/shm" in name
    return False


@pytest.mark.ray
def test_receiver_maps_the_object_store_without_a_copy() -> None:
    ray = pytest.importorskip(
        "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
    )

    def look(bucket: StoredBucket) -> tuple[list[bool], list[float]]:
        weights = bucket.unpack_weights()
        return [is_in_shared_memory(tensor) for _, tensor in weights], [
            float(tensor.float().sum()) for _, tensor in weights
        ]

    large = {"first": torch.ones(1 << 18), "second": torch.full((1 << 20,), 2.0)}
    worker = Worker()
    worker.export_weights = lambda: WeightStream(NamedWeight(*item) for item in large.items())  # type: ignore[method-assign]
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        remote = ray.remote(look)
        handed = hand_over_weights(cast("TrainingWorker", worker), remote.remote, 1 << 20, True)
        reports = ray.get(list(handed.refs))
    finally:
        ray.shutdown()
    assert handed.num_bytes == 4 * (1 << 18) + 4 * (1 << 20)
    assert reports == [([True], [float(1 << 18)]), ([True], [float(2 << 20)])]
