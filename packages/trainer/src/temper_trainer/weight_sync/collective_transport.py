"""A transport that sends weights directly into the memory of the servers' workers.

Rank 0 of the actor broadcasts buckets with NCCL or gloo. Or each rank lets the workers on its own
GPU map its buffer through CUDA IPC, so a server may share the GPUs of several ranks. No copy of the
weights remains outside actor and servers.
"""

import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

from temper_engine_api.errors import EngineStateError
from temper_trainer.config.run import LOOPBACK
from temper_trainer.rollout.sampler import Replica, ReplicaError
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_channel import (
    Backend,
    ChannelSpec,
    DeviceLocation,
    abandon_channel,
)
from temper_trainer.weight_sync.channel_sender import (
    close_sender_channel,
    open_sender_channel,
    open_store,
    plan_buckets,
    send_delta,
    send_weights,
)
from temper_trainer.weight_sync.sender_state import (
    drop_cached_weights,
)
from temper_trainer.weight_sync.transport import RankGroup, SentWeights

logger = logging.getLogger(__name__)
_TIMEOUT_MARGIN_S = 60.0
"""Seconds that the members of a channel wait longer for a server than the sampler does."""


class JoinError(ReplicaError):
    """A server cannot join a channel."""

    def __init__(self, message: str, *, replica: Replica) -> None:
        super().__init__(message)
        self.replica = replica


class CollectiveTransport:
    """Channels between ranks of the actor and every worker of every server.

    There is one channel, from rank 0, or one from each rank to the workers on its GPU. A channel
    cannot lose or get members. So when a server has died, joined or left, new channels are opened
    before the next publish. If a server dies during a publish, the publish is repeated.

    A restarted server gets the actor's weights again at once if no update has changed them since
    and nothing else may call the actor at the same time (`loop=sync`). Otherwise it gets weights at
    the next publish, and the run ends if no other server has the current weights.
    """

    def __init__(
        self,
        *,
        actor: RankGroup,
        sampler: VllmSampler,
        backend: Backend,
        workers_per_replica: int,
        bucket_bytes: int,
        with_digest: bool,
        load_timeout_s: float,
        can_resend: bool,
        senders: Sequence[DeviceLocation] | None = None,
        max_changed_fraction: float | None = None,
        bind_address: str = LOOPBACK,
    ) -> None:
        """Open no channel yet; `send` does, and repeats it if a server dies meanwhile.

        Args:
            actor: Its model is built.
            sampler: Its servers are running.
            backend: How bytes travel.
            workers_per_replica: One server's worker processes.
            bucket_bytes: Largest bucket; a larger tensor travels in its own bucket.
            with_digest: Compare checksums.
            load_timeout_s: Time after which the sampler ends a server that loads weights.
            can_resend: True if the actor may be called at any time while servers sample.
            senders: Location of each rank of the actor, if each sends to the workers on its own
                GPU. None: rank 0 sends to all.
            max_changed_fraction: Send deltas to servers that have the last weights; see
                `compute_delta`. None always sends all weights.
            bind_address: Where the sender listens, unless its process group already has an address.
        """
        self._bind_address = bind_address
        self._actor = actor
        self._sampler = sampler
        self._backend: Backend = backend
        self._workers_per_replica = workers_per_replica
        self._senders = senders
        self._bucket_bytes = bucket_bytes
        self._with_digest = with_digest
        self._load_timeout_s = load_timeout_s
        self._can_resend = can_resend
        self._max_changed_fraction = max_changed_fraction
        self._key = uuid.uuid4().hex
        self._layout = actor.run_on_all(plan_buckets, bucket_bytes)[0]
        self._last_sent = (-1, 0)
        """The actor's number of updates at the last publish, and its version."""
        self._cached_version: int | None = None
        """Version that rank 0 has cached; None before the first publish and after a failed one."""
        self._num_changes = -1
        """Number of changes of the sampler's servers when the channels were opened."""
        self._specs: Mapping[int, ChannelSpec] = {}
        """Spec of each open channel, by the rank of the actor that sends."""

    def send(self, version: int) -> SentWeights:
        """Broadcast every bucket or its delta while every server receives it."""
        self._last_sent = (self._actor.num_updates, version)
        problem = ""
        with self._sampler.hold_members():
            while True:
                self._sampler.restart_dead(problem=problem)
                try:
                    self._open_current()
                except JoinError as error:
                    has_left = self._sampler.refuse(error.replica, reason=str(error))
                    problem = "" if has_left else str(error)
                    continue
                except ReplicaError as error:
                    problem = str(error)
                    continue
                sent = self._send_once(version)
                if not sent.problem:
                    return sent
                problem = sent.problem
                logger.warning("weights %d are sent again: %s", version, problem)
                self._num_changes = -1  # a channel is of no use after an error

    def _send_once(self, version: int) -> SentWeights:
        """Send to channel members; the result names a problem if one was lost."""
        # None until all servers have loaded the weights: after a failed publish it is unknown which
        # weights they have, and no delta would fit.
        base_version, self._cached_version = self._find_base_version(), None
        results: list[SentWeights] = []

        def receive(replica: Replica) -> "Future[object]":
            if base_version is None:
                return self._start_receiving(replica, version, self._specs)
            received = replica.call("receive_delta", self._layout, base_version, version)
            return _abandon_on_error(received, self._specs)

        def send() -> str:
            results.append(
                self._broadcast(self._specs, version)
                if base_version is None
                else self._broadcast_delta(base_version, version)
            )
            return results[0].problem

        reload = self._resend if self._can_resend else None
        problem = self._sampler.load_while_sending(receive, send, version=version, reload=reload)
        if not problem and self._max_changed_fraction is not None:
            self._cached_version = version
        return replace(results[0], problem=problem)

    def _open_current(self) -> None:
        """Open channels to the servers that receive weights now, unless they are open."""
        if self._num_changes == self._sampler.num_changes:
            return
        self._close_channels(self._specs)
        self._specs = {}
        self._specs = self._open(self._sampler.replicas)
        self._num_changes = self._sampler.num_changes

    def close(self) -> None:
        """Close the channels and free the cached weights."""
        self._close_channels(self._specs)
        if self._max_changed_fraction is not None:
            self._actor.run_on_all(drop_cached_weights, self._key)

    def _find_base_version(self) -> int | None:
        """Return the version that rank 0 and all workers have; None if one has another version."""
        version = self._cached_version
        if version is None:
            return None
        replicas = self._sampler.replicas
        futures = [replica.call("cached_version") for replica in replicas]
        for replica, future in zip(replicas, futures, strict=True):
            if future.result() != version:
                logger.warning(
                    "%s does not have weights %d: sending all weights instead of a delta.",
                    replica.name,
                    version,
                )
                return None
        return version

    def _open(self, replicas: Sequence[Replica]) -> dict[int, ChannelSpec]:
        """Open channels to these servers; each server closes its previous channels.

        Returns:
            The spec of each channel, by the rank of the actor that sends.

        Raises:
            JoinError: If a server has not reached the actor's store.
            ReplicaError: If a channel could not be opened for another reason.
        """
        senders = self._choose_senders(replicas)
        sizes = Counter(rank for ranks in senders for rank in ranks)
        specs: dict[int, ChannelSpec] = {}
        with self._close_on_error(specs):
            specs.update(self._listen(sizes))
            self._join(replicas, senders=senders, specs=specs)
        return specs

    def _listen(self, sizes: Mapping[int, int]) -> dict[int, ChannelSpec]:
        """Start the store of each channel on its sender; return the specs by rank of the sender.

        Args:
            sizes: Number of receivers by rank of the sender.
        """
        stores = self._actor.run_on_all(open_store, self._bind_address, tuple(sizes))
        return {
            rank: ChannelSpec(
                backend=self._backend,
                address=stores[rank][0],
                port=stores[rank][1],
                token=stores[rank][2],
                size=1 + num_workers,
                # The largest bucket may be above bucket_bytes: a large tensor has its own bucket.
                buffer_bytes=max(bucket.num_bytes for bucket in self._layout),
                with_digest=self._with_digest,
                # A slow server is ended by the sampler, which names it, before the others give up.
                timeout_s=self._load_timeout_s + _TIMEOUT_MARGIN_S,
            )
            for rank, num_workers in sizes.items()
        }

    def _join(
        self,
        replicas: Sequence[Replica],
        *,
        senders: Sequence[Sequence[int]],
        specs: Mapping[int, ChannelSpec],
    ) -> None:
        """Let actor and servers join the channels; see `_open`."""
        failed: list[JoinError] = []

        def abandon_if_failed(replica: Replica, join: "Future[object]") -> None:
            # The actor and the other servers would wait for this one until their timeout.
            if (error := join.exception()) is not None:
                failed.append(JoinError(str(error), replica=replica))
                if len(failed) == 1:
                    abandon_channels(specs.values())

        joined: Counter[int] = Counter()
        joins = []
        # The server of each member, by the rank of its sender and its own in the channel.
        replicas_by_rank: dict[tuple[int, int], Replica] = {}
        for replica, ranks in zip(replicas, senders, strict=True):
            members = []
            for rank in ranks:
                joined[rank] += 1
                replicas_by_rank[rank, joined[rank]] = replica
                members.append(replace(specs[rank], rank=joined[rank]))
            join = replica.call("join_channels", members)
            join.add_done_callback(partial(abandon_if_failed, replica))
            joins.append(join)
        # Join before waiting for the servers, because each member returns only when all have
        # joined.
        opened = self._actor.run_on_all(open_sender_channel, specs)
        absent = {
            id(replicas_by_rank[rank, member])
            for rank, (_, members) in enumerate(opened)
            for member in members
        }
        # The first one: the others may have come later than the end of the channel. A server that
        # was there may have failed only because another one died.
        for error in failed:
            if id(error.replica) in absent:
                raise error
        for join in joins:
            join.result()
        if problems := [problem for problem, _ in opened if problem]:
            raise ReplicaError("; ".join(problems))

    @contextmanager
    def _close_on_error(self, specs: Mapping[int, ChannelSpec]) -> Iterator[None]:
        """Close channels, and stores that have none yet, if the body raises."""
        try:
            yield
        except BaseException as error:
            try:
                self._actor.run_on_all(close_sender_channel, specs)
            # The first error tells the cause: an actor that has ended cannot close its channels.
            except Exception as cleanup_error:  # noqa: BLE001
                error.add_note(f"The actor's channels were not closed: {cleanup_error}")
            raise

    def _choose_senders(self, replicas: Sequence[Replica]) -> list[list[int]]:
        """Return for each server the rank of the actor that sends to each of its workers."""
        if self._senders is None:
            return [[0] * self._workers_per_replica for _ in replicas]
        # Asked every time: servers may have been restarted or have joined on other GPUs.
        futures = [replica.call("device_locations") for replica in replicas]
        workers = [cast("list[tuple[str, str | None]]", future.result()) for future in futures]
        ranks = []
        for replica, locations in zip(replicas, workers, strict=True):
            server = [DeviceLocation(host=host, gpu=gpu) for host, gpu in locations]
            try:
                ranks += assign_senders([server], senders=self._senders)
            except ReplicaError as error:
                raise JoinError(f"{replica.name}: {error}", replica=replica) from error
        return ranks

    def _resend(self, replica: Replica) -> "Future[object]":
        """Send the last weights to one restarted server over a separate channel.

        The other servers continue to sample meanwhile.

        Raises:
            ReplicaError: If the actor's weights have changed.
        """
        num_updates, version = self._last_sent
        if self._actor.num_updates != num_updates:
            raise ReplicaError(
                f"{replica.name} was restarted, but the actor's weights have changed since version "
                f"{version}: resume the run from its last checkpoint."
            )
        self._num_changes = -1  # the server has left the channel of all
        specs = self._open([replica])
        with self._close_on_error(specs):
            received = self._start_receiving(replica, version, specs)
            sent = self._broadcast(specs, version)
        self._close_channels(specs)
        if sent.problem:
            raise ReplicaError(f"{replica.name} did not get the weights: {sent.problem}")
        return received

    def _start_receiving(
        self, replica: Replica, version: int, specs: Mapping[int, ChannelSpec]
    ) -> "Future[object]":
        keeps_copy = () if self._max_changed_fraction is None else (True,)
        received = replica.call("receive_weights", self._layout, version, *keeps_copy)
        return _abandon_on_error(received, specs)

    def _broadcast(self, specs: Mapping[int, ChannelSpec], version: int) -> SentWeights:
        key = None if self._max_changed_fraction is None else self._key
        return _merge_sent(
            self._actor.run_on_all(
                send_weights, specs, self._layout, self._bucket_bytes, key, version
            )
        )

    def _broadcast_delta(self, base_version: int, version: int) -> SentWeights:
        return _merge_sent(
            self._actor.run_on_all(
                send_delta,
                self._specs,
                self._bucket_bytes,
                self._key,
                base_version,
                version,
                self._max_changed_fraction,
            )
        )

    def _close_channels(self, specs: Mapping[int, ChannelSpec]) -> None:
        if specs:
            self._actor.run_on_all(close_sender_channel, specs)


def assign_senders(
    workers: Sequence[Sequence[DeviceLocation]], *, senders: Sequence[DeviceLocation]
) -> list[list[int]]:
    """Return for each worker of each server the first rank of the actor on the same GPU.

    Example:
        >>> gpus = [DeviceLocation(host="a", gpu=f"GPU-{i}") for i in range(4)]
        >>> assign_senders([[gpus[2], gpus[3]], [gpus[0], gpus[1]]], senders=gpus)
        [[2, 3], [0, 1]]

    Raises:
        ReplicaError: If a worker is on a GPU without an actor rank.
    """
    # Reversed, so that the first of several ranks on a GPU stays in the dictionary.
    ranks = {sender: rank for rank, sender in reversed(list(enumerate(senders)))}
    if absent := [each for server in workers for each in server if each not in ranks]:
        raise ReplicaError(
            f"a server is on GPU {absent[0].gpu} of host {absent[0].host}, which no rank of the "
            "actor uses, so weights cannot get there by cuda_ipc. Give rollout.pool the pool of "
            "the actor, or start servers that listen only on the actor's GPUs. With all servers on "
            "the actor's host, weight_sync.transport=shared_memory reaches every GPU."
        )
    return [[ranks[worker] for worker in server] for server in workers]


def _abandon_on_error(
    received: "Future[object]", specs: Mapping[int, ChannelSpec]
) -> "Future[object]":
    """Abandon channels if a server fails, because members do not notice this with NCCL."""

    def abandon(received: "Future[object]") -> None:
        if received.exception() is not None:
            abandon_channels(specs.values())

    received.add_done_callback(abandon)
    return received


def abandon_channels(specs: Iterable[ChannelSpec]) -> None:
    """Let the members of channels that wait for another one fail at once."""
    for spec in specs:
        try:
            abandon_channel(spec)
        except EngineStateError as error:
            # The sender has failed too, and does not listen any more.
            logger.debug("a channel is closed already: %s", error)


def _merge_sent(sent: Sequence[SentWeights]) -> SentWeights:
    """Return the result from the ranks that send the same weights, and the first problem."""
    # Ranks without a channel have sent nothing.
    most = max(sent, key=lambda each: each.num_bytes)
    return replace(most, problem=next((each.problem for each in sent if each.problem), ""))
