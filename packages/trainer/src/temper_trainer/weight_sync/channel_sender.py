"""The sending ends of weight channels: functions that run on every actor rank.

`temper_trainer.weight_sync.collective_transport` calls them from the driver.
"""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from temper_engine_api.distributed.rendezvous import TOKEN_VARIABLE, StoreServer
from temper_engine_api.weights import NamedWeight
from temper_trainer.config.run import LOOPBACK
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    pack_tensors,
    plan_layout,
    split_into_buckets,
)
from temper_trainer.rollout.weight_channel import (
    ChannelError,
    ChannelSpec,
    DeviceLocation,
    WeightChannel,
    locate_device,
)
from temper_trainer.rollout.weight_delta import (
    apply_tensor_delta,
    compute_delta,
    compute_tensors_digest,
)
from temper_trainer.weight_sync.buckets import WeightExporter, participate_in_export
from temper_trainer.weight_sync.sender_state import (
    CachedWeights,
    WeightSender,
    drop_cached_weights,
    get_sender_state,
    iterate_checked_buckets,
    take_cached_weights,
)
from temper_trainer.weight_sync.transport import SentWeights


def locate_sender(worker: WeightExporter, may_use_gpu: bool) -> DeviceLocation:
    """Return where this rank's weights are."""
    if may_use_gpu and torch.cuda.is_available():
        return locate_device(torch.device("cuda", torch.cuda.current_device()))
    return locate_device(torch.device("cpu"))


def open_store(
    worker: WeightSender, bind_address: str, ranks: Sequence[int] = (0,)
) -> tuple[str, int, str]:
    """Start the store of a weight channel on some ranks; return address, port and new token.

    Other ranks return port 0 and an empty token.
    """
    if worker.rank not in ranks:
        return "", 0, ""
    if tuple(ranks) == (0,):
        # With Ray, MASTER_ADDR is an address of rank 0 that other nodes can reach, so servers use
        # it too. Without Ray everything is on this host.
        address = os.environ["MASTER_ADDR"] if TOKEN_VARIABLE in os.environ else bind_address
    else:
        # Each rank sends only to workers on its own GPU, which are on its host.
        address = LOOPBACK
    # StoreServer binds its port immediately, so that no other process can take it.
    # Do not use the run's token, which also protects ranks and gateway: the channel's token is sent
    # to vLLM servers, which another user may have started, over an unencrypted connection.
    token = secrets.token_hex(32)
    server = StoreServer(address, token=token)
    get_sender_state(worker).stores[f"{address}:{server.port}"] = server
    return address, server.port, token


def plan_buckets(worker: WeightExporter, bucket_bytes: int) -> list[PackedBucket]:
    """Return each bucket's layout, the same at every publish."""
    with worker.export_weights() as stream:
        layouts = [
            plan_layout(bucket) for bucket in split_into_buckets(stream, bucket_bytes=bucket_bytes)
        ]
    return [
        PackedBucket(entries=entries, num_bytes=num_bytes, digest=None)
        for entries, num_bytes in layouts
    ]


def open_sender_channel(
    worker: WeightSender, specs: Mapping[int, ChannelSpec]
) -> tuple[str, tuple[int, ...]]:
    """Open this rank's end of its channel; ranks without a channel do nothing.

    Returns:
        The reason if a receiver did not join, and otherwise an empty text. The ranks of the channel
        that have not reached this rank's store.
    """
    spec = specs.get(worker.rank)
    if spec is None:
        return "", ()
    is_on_cpu = spec.backend == "gloo"
    device = torch.device("cpu" if is_on_cpu else f"cuda:{torch.cuda.current_device()}")
    state, address = get_sender_state(worker), f"{spec.address}:{spec.port}"
    server = state.stores.pop(address)
    try:
        state.channels[address] = WeightChannel(spec, device=device, server=server)
    except ChannelError as error:
        return str(error), error.absent
    return "", ()


def send_weights(
    worker: WeightSender,
    specs: Mapping[int, ChannelSpec],
    layout: Sequence[PackedBucket],
    bucket_bytes: int,
    key: str | None = None,
    version: int = 0,
) -> SentWeights:
    """Send all buckets from the ranks that have a channel.

    Args:
        worker: A worker of the actor.
        specs: Spec of each open channel, by the rank that sends.
        layout: Layout of each bucket, from `plan_buckets`.
        bucket_bytes: The same as for the layout.
        key: Cache the weights under this key, so that a delta can follow; None caches nothing.
        version: Version of the weights.

    Raises:
        WeightError: If the weights have another layout.
    """
    spec = specs.get(worker.rank)
    if spec is None:
        participate_in_export(worker)
        return SentWeights(num_bytes=0, fraction=1.0)
    channel = get_sender_state(worker).channels[f"{spec.address}:{spec.port}"]
    entries = tuple(bucket.entries for bucket in layout)
    cached: list[tuple[Tensor, ...]] = []
    if key is not None:
        # Freed first: otherwise two copies of the model would be in memory.
        drop_cached_weights(worker, key)
    with worker.export_weights() as stream, _close_on_error(worker, spec, stream) as problems:
        matched = iterate_checked_buckets(stream, entries, bucket_bytes=bucket_bytes)
        for (weights, expected), bucket in zip(matched, layout, strict=True):
            data = channel.get_bucket_buffer(bucket.num_bytes)
            pack_tensors(data, weights, expected)
            channel.send(data)
            if key is not None:
                # A copy, because the buffer is reused for the next bucket.
                copy = data.to("cpu", copy=True)
                cached.append(tuple(entry.read(copy) for entry in expected))
    if problems:
        return SentWeights(num_bytes=0, fraction=0.0, problem=problems[0])
    if key is not None:
        get_sender_state(worker).cached[key] = CachedWeights(
            version=version, entries=entries, tensors=tuple(cached)
        )
    return SentWeights(num_bytes=sum(bucket.num_bytes for bucket in layout), fraction=1.0)


def send_delta(
    worker: WeightSender,
    specs: Mapping[int, ChannelSpec],
    bucket_bytes: int,
    key: str,
    base_version: int,
    version: int,
    max_changed_fraction: float,
) -> SentWeights:
    """Send the delta of all buckets from the ranks that have a channel.

    Raises:
        WeightError: If such a rank has not cached `base_version`, or the weights have another
            layout.
    """
    spec = specs.get(worker.rank)
    if spec is None:
        participate_in_export(worker)
        return SentWeights(num_bytes=0, fraction=0.0)
    channel = get_sender_state(worker).channels[f"{spec.address}:{spec.port}"]
    cached = take_cached_weights(worker, key, version=base_version)
    num_bytes, num_elements = 0, 0
    with worker.export_weights() as stream, _close_on_error(worker, spec, stream) as problems:
        for index, (weights, entries) in enumerate(
            iterate_checked_buckets(stream, cached.entries, bucket_bytes=bucket_bytes)
        ):
            delta = compute_delta(
                weights, cached.tensors[index], max_changed_fraction=max_changed_fraction
            )
            digest = (
                compute_tensors_digest([weight.tensor for weight in weights])
                if spec.with_digest
                else None
            )
            num_bytes += channel.send_delta(delta, entries=entries, updated_digest=digest)
            num_elements += sum(tensor_delta.values.numel() for tensor_delta in delta)
            for target, tensor_delta in zip(cached.tensors[index], delta, strict=True):
                apply_tensor_delta(target, tensor_delta)
    if problems:
        return SentWeights(num_bytes=0, fraction=0.0, problem=problems[0])
    # take_cached_weights removed the cache, so that no half-updated one stays if a bucket fails.
    get_sender_state(worker).cached[key] = replace(cached, version=version)
    return SentWeights(num_bytes=num_bytes, fraction=num_elements / cached.num_elements)


@contextmanager
def _close_on_error(
    worker: WeightSender, spec: ChannelSpec, stream: Iterator[NamedWeight]
) -> Iterator[list[str]]:
    """Yield a list; if the channel fails in the body, close it and add the reason to the list."""
    problems: list[str] = []
    try:
        yield problems
    except ChannelError as error:
        problems.append(str(error))
        # Receivers that wait for the other buckets would not notice that none follow.
        _close_channel(worker, spec)
        # Other ranks take part in gathering the remaining tensors; they would wait forever.
        for _ in stream:
            pass


def close_sender_channel(worker: WeightSender, specs: Mapping[int, ChannelSpec]) -> None:
    """Close this rank's end of its channel, and every store whose channel was never opened."""
    spec = specs.get(worker.rank)
    if spec is not None:
        _close_channel(worker, spec)
    stores = get_sender_state(worker).stores
    while stores:
        _, server = stores.popitem()
        server.close()
        server.abandon()


def _close_channel(worker: WeightSender, spec: ChannelSpec) -> None:
    channel = get_sender_state(worker).channels.pop(f"{spec.address}:{spec.port}", None)
    if channel is not None:
        channel.close()
