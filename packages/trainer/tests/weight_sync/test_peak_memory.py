"""Measure that a tensor larger than a bucket is copied once while packing, sending and loading."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packages.trainer.tests.checkpoint.exports_for_tests import SPEC, full_disk, make_tokenizer
from temper_engine_api.errors import CheckpointError
from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.checkpoint import huggingface_export
from temper_trainer.loops.run.run_folder import write_exported_model
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    check_digest,
    open_weight_file,
    unpack_tensors,
)
from temper_trainer.rollout.weight_channel import ChannelSpec
from temper_trainer.weight_sync.buckets import pack_buckets, unpack_buckets
from temper_trainer.weight_sync.sender_state import drop_cached_weights
from temper_trainer.weight_sync.shared_memory_transport import write_weight_files
from temper_trainer.weight_sync.stream_transport import cache_current_weights

from .test_collective_transport import Actor, Server, transport_between

BUCKET = 16 << 20
"""Bytes; above what a checksum computes at once, which is bounded however large a bucket is."""
WIDE = 5 * BUCKET
"""Elements of the one tensor that is larger than a bucket."""
ONCE = WIDE + 2 * BUCKET
"""One copy of it, and two buckets; two copies would be 10 buckets."""


class LiveBytes(TorchDispatchMode):
    """Records the peak of bytes of tensors that operations of this thread allocated."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in given}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and count."""
        outputs = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                if reference.cdata not in self._given:
                    self._alive[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))
        return outputs


def weights() -> dict[str, Tensor]:
    return {
        "small": torch.ones(256),
        "wide": torch.rand(1024, WIDE // 4096),
        "last": torch.ones(BUCKET // 8),
    }


def transposed() -> dict[str, Tensor]:
    return {"wide": torch.rand(1024, WIDE // 4096).t(), "last": torch.ones(16)}


def stream(source: dict[str, Tensor]) -> Iterator[NamedWeight]:
    return (NamedWeight(name, tensor) for name, tensor in source.items())


def load(arriving: Iterator[NamedWeight], target: dict[str, Tensor]) -> None:
    for name, tensor in arriving:
        target[name].copy_(tensor)


class Rank:
    """A training worker, in this process."""

    is_first = True

    def __init__(self, source: dict[str, Tensor]) -> None:
        self._source = source
        self.transport_state: dict[str, object] = {}

    def export_weights(self) -> WeightStream:
        """Yield all weights as views of the source."""
        return WeightStream(stream(self._source))


class RecordingRank(Rank):
    """A training worker that records the tensors of its exports."""

    def __init__(self, source: dict[str, Tensor]) -> None:
        super().__init__(source)
        self.exported: list[str] = []

    def export_weights(self) -> WeightStream:
        """Yield all weights as views of the source."""
        return WeightStream(self._record())

    def _record(self) -> Iterator[NamedWeight]:
        for weight in stream(self._source):
            self.exported.append(weight.name)
            yield weight


def same(source: dict[str, Tensor], target: dict[str, Tensor]) -> bool:
    return all(target[name].equal(tensor) for name, tensor in source.items())


def test_peak_memory_counts_two_copies() -> None:
    source = torch.rand(WIDE // 4)
    with LiveBytes(source) as live:
        first = source.clone()
        del first
        once = live.peak
        kept = [source.clone(), source.clone()]
    assert (once, live.peak, len(kept)) == (WIDE, 2 * WIDE, 2)


@pytest.mark.parametrize("make", [weights, transposed])
def test_wide_tensor_is_copied_once_in_one_process(make: Callable[[], dict[str, Tensor]]) -> None:
    source = make()
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    with LiveBytes(*source.values(), *target.values()) as live:
        load(unpack_buckets(pack_buckets(stream(source), bucket_bytes=BUCKET)), target)
    assert WIDE <= live.peak <= ONCE
    assert same(source, target)


@pytest.mark.parametrize("make", [weights, transposed])
def test_wide_tensor_is_written_once_into_shared_memory_and_read_from_there(
    make: Callable[[], dict[str, Tensor]], tmp_path: Path
) -> None:
    source = make()
    target = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    with LiveBytes(*source.values()) as sending:
        weight_files = write_weight_files(Rank(source), str(tmp_path / "set"), BUCKET, True)
    gc.collect()
    with LiveBytes(*target.values()) as receiving:
        for weight_file in weight_files:
            data = open_weight_file(weight_file)
            check_digest(data, weight_file)
            load(unpack_tensors(data, weight_file), target)
    # Here the pages of the file are counted on both sides, though they are the same memory.
    assert WIDE <= sending.peak <= ONCE
    assert WIDE <= receiving.peak <= ONCE
    assert same(source, target)


class Receiver(Server):
    """The other end of a channel, which loads every bucket into its target as it comes."""

    def __init__(self, target: dict[str, Tensor]) -> None:
        super().__init__()
        self.target = target
        self.live = LiveBytes(*target.values())

    def join_channels(self, specs: list[ChannelSpec]) -> None:
        """Open this end."""
        with self.live:
            super().join_channels(specs)

    def receive_weights(
        self, layout: list[PackedBucket], version: int, keep_copy: bool = False
    ) -> int:
        """Receive every bucket."""
        self.version = version
        assert self.channel is not None
        with self.live:
            for weight_file in layout:
                load(unpack_tensors(self.channel.receive(weight_file), weight_file), self.target)
        return version


def test_wide_tensor_is_copied_once_on_each_side_of_a_broadcast() -> None:
    actor = Actor()
    actor.weights = weights()
    receiver = Receiver({name: torch.zeros_like(tensor) for name, tensor in actor.weights.items()})
    with LiveBytes(*actor.weights.values()) as sending:
        transport = transport_between(actor, receiver, bucket_bytes=BUCKET)
        for version in (1, 2):
            transport.send(version)
    transport.close()
    assert WIDE <= sending.peak <= ONCE
    assert WIDE <= receiver.live.peak <= ONCE
    assert same(actor.weights, receiver.target)


def test_copy_for_deltas_replaces_the_previous_one() -> None:
    actor = Actor()
    actor.weights = weights()
    total = sum(tensor.nbytes for tensor in actor.weights.values())
    receiver = Receiver({name: torch.zeros_like(tensor) for name, tensor in actor.weights.items()})
    with LiveBytes(*actor.weights.values()) as sending:
        transport = transport_between(
            actor, receiver, bucket_bytes=BUCKET, max_changed_fraction=0.25
        )
        transport.send(1)
        receiver.version = -1  # like a restarted receiver: all weights are sent again
        transport.send(2)
    transport.close()
    # The kept set, whose tensors lie where they were received, and the channel's buffer.
    assert total + WIDE <= sending.peak <= total + ONCE


def test_copy_for_a_sampler_replaces_the_previous_one() -> None:
    source = transposed()
    rank = Rank(source)
    with LiveBytes(*source.values()) as live:
        for version in (1, 2):
            cache_current_weights(rank, "memory", BUCKET, version)
    drop_cached_weights(rank, "memory")
    assert WIDE <= live.peak <= ONCE


def test_exported_model_is_written_with_one_shard_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_export, "SHARD_BYTES", BUCKET)
    source = {f"weight-{i}": torch.rand(BUCKET // 16) for i in range(32)}
    with LiveBytes(*source.values()) as live:
        write_exported_model(Rank(source), SPEC, make_tokenizer(), tmp_path / "model")
    # A shard has four of the 32 tensors; the next one is copied before the shard is written.
    assert BUCKET <= live.peak <= 1.25 * BUCKET
    written: dict[str, Tensor] = {}
    for path in (tmp_path / "model").glob("*.safetensors"):
        written |= load_file(path)
    assert same(source, written)


def test_full_disk_does_not_leave_other_ranks_waiting_for_the_rest_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_export, "SHARD_BYTES", 1 << 16)
    rank = RecordingRank({f"weight-{i}": torch.rand(1 << 14) for i in range(8)})
    with (
        full_disk(at=1 << 12),
        pytest.raises(CheckpointError, match="could not be written to"),
    ):
        write_exported_model(rank, SPEC, make_tokenizer(), tmp_path / "model")
    assert rank.exported == [f"weight-{i}" for i in range(8)]
    assert list(tmp_path.iterdir()) == []
