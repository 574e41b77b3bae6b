"""Weights from rank 0 of the actor into the servers' workers, GPU to GPU: a broadcast, or the same memory through CUDA IPC."""

import socket
from collections.abc import Sequence
from concurrent.futures import Future

import torch

from temper_engine_api.errors import WeightError
from temper_trainer.rollout.channel import Backend, Channel, ChannelSpec
from temper_trainer.rollout.parcels import Parcel, cut, fill, layout_of
from temper_trainer.rollout.replica import Replica
from temper_trainer.rollout.vllm.sampler import VllmSampler
from temper_trainer.weight_sync.buckets import ExportsWeights
from temper_trainer.weight_sync.transport import RunsOnRanks

_channels: dict[str, Channel] = {}
"""The sender's ends in this process, by address and port: a worker's method has no place to keep one."""


class CollectiveTransport:
    """A channel between rank 0 of the actor and every worker of every server; nothing touches the host's memory.

    A server that is started again needs a new channel, so a death ends the run at the next publish instead of repeating it.
    """

    def __init__(
        self, *, actor: RunsOnRanks, sampler: VllmSampler, backend: Backend, workers_per_replica: int, bucket_bytes: int, with_digest: bool
    ) -> None:
        self._actor = actor
        self._sampler = sampler
        self._bucket_bytes = bucket_bytes
        self._layout = actor.run(plan_set, [(bucket_bytes,)] * actor.num_workers)[0]
        replicas = sampler.replicas
        address, port = actor.run(find_place, [()] * actor.num_workers)[0]
        self._spec = ChannelSpec(
            backend=backend,
            address=address,
            port=port,
            size=1 + len(replicas) * workers_per_replica,
            # A tensor larger than a bucket travels alone.
            buffer_bytes=max(parcel.num_bytes for parcel in self._layout),
            with_digest=with_digest,
        )
        joins = []
        for number, replica in enumerate(replicas):
            first_rank = 1 + number * workers_per_replica
            joins.append(replica.call("join_channel", {**self._spec.plain(), "first_rank": first_rank}))
        actor.run(open_sender, [(self._spec,)] * actor.num_workers)
        _wait(joins)

    def send(self, version: int) -> None:
        """Broadcast every bucket, while every server receives it."""
        arguments = [(self._spec, self._layout, self._bucket_bytes)] * self._actor.num_workers

        def receive(replica: Replica) -> "Future[object]":
            return replica.call("receive_set", self._layout, version)

        self._sampler.load_while(receive, lambda: self._actor.run(send_set, arguments), version=version)

    def close(self) -> None:
        """Leave the channel."""
        self._actor.run(close_sender, [(self._spec,)] * self._actor.num_workers)


def has_cuda(worker: ExportsWeights) -> bool:
    """Runs on the actor: whether its machine has a CUDA device."""
    return torch.cuda.is_available()


def find_place(worker: ExportsWeights) -> tuple[str, int]:
    """Runs on the actor: an address and a free port where rank 0 can be met."""
    address = "127.0.0.1" if socket.gethostname() == "localhost" else _own_address()
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
    return address, port


def plan_set(worker: ExportsWeights, bucket_bytes: int) -> list[Parcel]:
    """Runs on every rank of the actor: what each bucket will hold; the same in every set."""
    with worker.export_weights() as stream:
        layouts = [layout_of(part) for part in cut(stream, bucket_bytes=bucket_bytes)]
    return [Parcel(entries=entries, num_bytes=num_bytes, digest=None) for entries, num_bytes in layouts]


def open_sender(worker: ExportsWeights, spec: ChannelSpec) -> None:
    """Runs on every rank of the actor: rank 0 opens its end."""
    if worker.is_first:
        device = torch.device("cpu") if spec.backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
        _channels[f"{spec.address}:{spec.port}"] = Channel(spec, rank=0, device=device)


def send_set(worker: ExportsWeights, spec: ChannelSpec, layout: Sequence[Parcel], bucket_bytes: int) -> None:
    """Runs on every rank of the actor: rank 0 packs and sends bucket after bucket, the others take part in the gathering.

    Raises:
        WeightError: the weights have other names, shapes or types than when the channel was opened.
    """
    with worker.export_weights() as stream:
        if not worker.is_first:
            for _ in stream:
                pass
            return
        channel = _channels[f"{spec.address}:{spec.port}"]
        parts = iter(cut(stream, bucket_bytes=bucket_bytes))
        for parcel in layout:
            part = next(parts, None)
            if part is None or layout_of(part)[0] != parcel.entries:
                raise WeightError("the actor's weights have other names, shapes or types than when the channel was opened.")
            data = channel.buffer(parcel.num_bytes)
            fill(data, part, parcel.entries)
            channel.send(data)


def close_sender(worker: ExportsWeights, spec: ChannelSpec) -> None:
    """Runs on every rank of the actor."""
    channel = _channels.pop(f"{spec.address}:{spec.port}", None)
    if channel is not None:
        channel.close()


def _own_address() -> str:
    """The address of this machine that others reach; none is asked."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def _wait(futures: "Sequence[Future[object]]") -> None:
    for future in futures:
        future.result()
