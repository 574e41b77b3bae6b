"""A channel that carries weights from one trainer process to the workers of samplers.

The channel is a process group of its own, next to those of trainer and samplers. Rank 0 of the
channel sends buckets of bytes, and every other rank receives all buckets. With `nccl` and `gloo` a
bucket is a broadcast. With `cuda_ipc`, receivers on the sender's GPU map the sender's buffer and
gloo only synchronizes.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from temper_engine_api.distributed.rendezvous import StoreServer, TokenStore
from temper_engine_api.errors import EngineStateError, TemperError
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    TensorEntry,
    check_digest,
    compute_digest,
)
from temper_trainer.rollout.shared_buffer import describe_buffer, parse_shared_buffer
from temper_trainer.rollout.weight_delta import (
    PackedDelta,
    TensorDelta,
    count_delta_bytes,
    pack_delta,
)

Backend = Literal["nccl", "gloo", "cuda_ipc"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ABANDON_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 30.0
"""Longest time to reach the sender's store."""
_POLL_S = 2e-5
"""Interval at which a member asks NCCL whether a transfer is complete."""
_STORE_POLL_S = 0.5
"""Interval at which a member that waits for a transfer asks whether the channel was abandoned."""
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class ChannelError(TemperError, RuntimeError):
    """A member of a channel has died or left: close the channel and open a new one."""

    def __init__(self, message: str, *, absent: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.absent = absent
        """Ranks that had not reached the sender's store when the others stopped waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLocation:
    """Host and GPU of a process, named the same by every process that can see them."""

    host: str
    """Host name and boot id. A container with its own host name has its own shared memory."""
    gpu: str | None = None
    """UUID of the GPU, because its index differs between processes; None for a CPU."""


def locate_device(device: torch.device) -> DeviceLocation:
    """Return the location of a device of this process."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return DeviceLocation(host=f"{socket.gethostname()} {boot_id}", gpu=gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """Everything that a member needs to join a channel."""

    backend: Backend
    address: str
    """Address of the sender."""
    port: int
    """Port of the sender's store."""
    size: int
    """Number of members, the sender included."""
    buffer_bytes: int
    """Size of the largest bucket."""
    with_digest: bool
    """Send a checksum after every bucket."""
    rank: int = 0
    """Rank of the member that gets this spec; 0 is the sender."""
    timeout_s: float = 600.0
    """Longest wait for another member."""
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Secret of this channel, which the store requires of every member."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """Secret of this channel. With cuda_ipc it authenticates the sender's buffer."""

    def to_dict(self) -> dict[str, object]:
        """Return the fields for a message."""
        return asdict(self)


class _Work(Protocol):
    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...


class _Group(Protocol):
    """The common methods of NCCL's and gloo's process groups, which torch's stubs omit."""

    def broadcast(self, tensors: list[Tensor], options: object) -> _Work: ...

    def barrier(self, options: object) -> _Work: ...

    def abort(self) -> None: ...


class WeightChannel:
    """One member's end of a channel."""

    def __init__(
        self,
        spec: ChannelSpec,
        *,
        device: torch.device,
        server: StoreServer | None = None,
    ) -> None:
        """Join the channel; return when all members have joined.

        Args:
            spec: The same for all members but for `rank`.
            device: Device of the buckets.
            server: Rank 0 only: the store that listens on the spec's port; None opens it.

        Raises:
            ChannelError: If not all members have joined in time.
        """
        self._spec = spec
        self._device = device
        timeout = timedelta(seconds=spec.timeout_s)
        if spec.rank == 0 and server is None:
            server = StoreServer(spec.address, port=spec.port, token=spec.token)
        self._server = server
        with ExitStack() as on_error:
            if server is not None:
                on_error.callback(server.close)
                # Members that are connected would wait for this one until their timeout.
                on_error.callback(server.abandon)
            with _report_lost_member():
                self._join(timeout)
            on_error.callback(self.close)
            if spec.backend == "nccl":
                # NCCL connects in the first transfer, and waits there for members that never come.
                self._broadcast(_make_integers([0], device=device))
            self._buffer = (
                self._open_shared_buffer()
                if spec.backend == "cuda_ipc"
                else self._allocate_buffer()
            )
            on_error.pop_all()

    def _join(self, timeout: timedelta) -> None:
        """Connect to the store and to the other members."""
        spec = self._spec
        store = TokenStore(
            spec.address,
            spec.port,
            token=spec.token,
            timeout=min(timeout, timedelta(seconds=_CONNECT_TIMEOUT_S)),
            # It listens before any member gets its spec.
            is_listening=True,
        )
        store.set_timeout(timeout)
        # Kept alive: the process group has only the C++ half of the store, which fails without the
        # Python half.
        self._store = store
        try:
            self._meet(store, timeout)
        except BaseException:
            store.close()
            raise

    def _meet(self, store: TokenStore, timeout: timedelta) -> None:
        """Wait for the other members, and connect to them."""
        spec, rank = self._spec, self._spec.rank
        # NCCL would wait for the others at the first transfer, and does not notice
        # `abandon_channel` there.
        try:
            store.set(_make_joined_key(rank), b"")
            store.wait([_make_joined_key(other) for other in range(spec.size)], timeout)
        except dist.DistStoreError as error:
            ranks = range(spec.size)
            absent = tuple(other for other in ranks if not store.check([_make_joined_key(other)]))
            lost = f"ranks {absent}" if absent else "a member that has joined"
            raise ChannelError(
                f"{lost} of the weight channel cannot be reached: {error}", absent=absent
            ) from error
        # The classes are used directly: init_process_group would replace the default group, which
        # belongs to the engine in the actor and to vLLM in a server.
        if spec.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with _disable_nccl_watchdog():
                self._group = cast("_Group", dist.ProcessGroupNCCL(store, rank, spec.size, options))
        else:
            gloo = dist.ProcessGroupGloo(
                store,
                rank,
                spec.size,
                _make_gloo_options(spec, timeout=timeout),  # type: ignore[arg-type]
            )
            self._group = cast("_Group", gloo)

    def send(self, data: Tensor) -> None:
        """Send one bucket to every receiver; `data` may be overwritten afterwards."""
        if self._spec.backend == "cuda_ipc":
            # Barriers order CPUs only, so each side also waits for its GPU work: the sender before
            # the first barrier, receivers before the second.
            torch.cuda.synchronize(self._device)
            self._barrier()
            digest = self._compute_digest(data)  # while the receivers read
            self._barrier()
        else:
            self._broadcast(data)
            digest = self._compute_digest(data)
        if digest is not None:
            self.send_integers([_to_signed(digest)])

    def receive(self, bucket: PackedBucket) -> Tensor:
        """Return the next bucket as [num_bytes] uint8, valid until the next call.

        Raises:
            WeightError: If it arrived damaged.
        """
        data = self.get_bucket_buffer(bucket.num_bytes)
        if self._spec.backend == "cuda_ipc":
            self._barrier()
            data = data.clone()  # the sender overwrites its buffer after the second barrier
            torch.cuda.synchronize(self._device)
            self._barrier()
        else:
            self._broadcast(data)
        if self._spec.with_digest:
            (digest,) = self.receive_integers(1)
            received = PackedBucket(
                entries=bucket.entries, num_bytes=bucket.num_bytes, digest=digest % 2**64
            )
            check_digest(data, received)
        return data

    def send_delta(
        self,
        delta: Sequence[TensorDelta],
        *,
        entries: Sequence[TensorEntry],
        updated_digest: int | None,
    ) -> int:
        """Send the delta of one bucket to every receiver and return its size in bytes."""
        counts = [tensor_delta.count for tensor_delta in delta]
        self.send_integers([*counts, _to_signed(updated_digest or 0)])
        num_bytes = count_delta_bytes(entries, counts)
        if num_bytes:
            data = self.get_bucket_buffer(num_bytes)
            pack_delta(data, delta, entries)
            self.send(data)
        return num_bytes

    def receive_delta(self, entries: tuple[TensorEntry, ...]) -> tuple[PackedDelta, Tensor]:
        """Return the description of the next bucket's delta and its bytes on the CPU.

        Raises:
            WeightError: If it arrived damaged.
        """
        *counts, updated_digest = self.receive_integers(len(entries) + 1)
        num_bytes = count_delta_bytes(entries, counts)
        data = torch.empty(0, dtype=torch.uint8)
        if num_bytes:
            bucket = PackedBucket(entries=entries, num_bytes=num_bytes, digest=None)
            data = self.receive(bucket).cpu()
        delta = PackedDelta(
            counts=tuple(counts),
            num_bytes=num_bytes,
            digest=None,
            updated_digest=updated_digest % 2**64 if self._spec.with_digest else None,
        )
        return delta, data

    def send_integers(self, values: Sequence[int]) -> None:
        """Send signed 64-bit integers to every receiver."""
        self._broadcast(_make_integers(values, device=self._control_device))

    def receive_integers(self, count: int) -> list[int]:
        """Receive as many integers as the sender sends."""
        values = _make_integers([0] * count, device=self._control_device)
        self._broadcast(values)
        return values.tolist()

    def get_bucket_buffer(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8 for one bucket; the same memory at every call."""
        assert num_bytes <= self._spec.buffer_bytes, "the channel was opened for smaller buckets"
        return self._buffer[:num_bytes]

    def close(self) -> None:
        """Leave the channel; members that wait for this one get a ChannelError."""
        if self._server is not None:
            self._server.close()
        if self._spec.backend == "nccl":
            # NCCL's watchdog thread may still use the store, so the store is not closed.
            self._group.abort()
        else:
            self._store.close()
            # Gloo closes its connections when the group is destroyed.
            del self._group

    @property
    def _control_device(self) -> torch.device:
        return self._device if self._spec.backend == "nccl" else torch.device("cpu")

    def _broadcast(self, data: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        with _report_lost_member():
            if self._spec.backend == "nccl":
                self._wait_for_nccl(self._group.broadcast([data], options))
            else:
                # No variable refers to the work: gloo keeps its connections as long as the work
                # lives, and the traceback of an error keeps variables.
                self._group.broadcast([data], options).wait()

    def _wait_for_nccl(self, work: _Work) -> None:
        """Wait on the host, because NCCL does not notice every loss of a member.

        Raises:
            ChannelError: If the channel was abandoned meanwhile, or its timeout is over.
        """
        begin = time.monotonic()
        last_check = begin
        while not work.is_completed():
            now = time.monotonic()
            if now - begin > self._spec.timeout_s:
                raise ChannelError(
                    f"a transfer through the weight channel took over {self._spec.timeout_s:g} s"
                )
            if now - last_check > _STORE_POLL_S:
                if self._store.is_abandoned():
                    raise ChannelError("a member of the weight channel was lost")
                last_check = now
            time.sleep(_POLL_S)
        # With a timeout, an error of NCCL is raised here. Without one, the result would be used.
        work.wait(timedelta(seconds=self._spec.timeout_s))

    def _compute_digest(self, data: Tensor) -> int | None:
        return compute_digest(data) if self._spec.with_digest else None

    def _barrier(self) -> None:
        with _report_lost_member():
            self._group.barrier(dist.BarrierOptions()).wait()

    def _allocate_buffer(self) -> Tensor:
        return torch.empty(self._spec.buffer_bytes, dtype=torch.uint8, device=self._device)

    def _open_shared_buffer(self) -> Tensor:
        """Allocate the buffer on rank 0; map rank 0's buffer on other ranks."""
        if self._spec.rank == 0:
            buffer = self._allocate_buffer()
            self._store.set("buffer", describe_buffer(buffer, nonce=self._spec.nonce).to_json())
            return buffer
        num_bytes = self._spec.buffer_bytes
        shared = parse_shared_buffer(
            self._store.get("buffer"), nonce=self._spec.nonce, num_bytes=num_bytes
        )
        return shared.map(num_bytes, device=self._device)


@contextmanager
def _disable_nccl_watchdog() -> Iterator[None]:
    """Let process groups of the body leave errors to their callers.

    Otherwise a thread of torch ends the process when NCCL loses a member or times out.
    """
    previous = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = previous


def _make_joined_key(rank: int) -> str:
    """Return the key of the store that a rank sets when it joins."""
    return f"joined {rank}"


def abandon_channel(spec: ChannelSpec) -> None:
    """Let the members that wait for another one fail: to join, or with NCCL to transfer.

    Raises:
        EngineStateError: If the sender abandoned the channel, or has ended.
    """
    store = TokenStore(
        spec.address,
        spec.port,
        token=spec.token,
        timeout=timedelta(seconds=_ABANDON_TIMEOUT_S),
        is_listening=True,
    )
    try:
        store.abandon()
    except dist.DistNetworkError as error:
        raise EngineStateError(f"the sender of the weight channel has ended: {error}") from error
    finally:
        store.close()


@contextmanager
def _report_lost_member() -> Iterator[None]:
    """Raise a ChannelError if a collective of the body fails."""
    try:
        yield
    except ChannelError:
        raise
    except RuntimeError as error:
        raise ChannelError(f"a member of the weight channel was lost: {error}") from error


def join_channel(spec: dict[str, object], *, device: torch.device) -> WeightChannel:
    """Open a receiver's end from the fields of a ChannelSpec."""
    return WeightChannel(ChannelSpec(**spec), device=device)  # type: ignore[arg-type]


def _make_gloo_options(spec: ChannelSpec, *, timeout: timedelta) -> object:
    """Return options that bind gloo to the network interface that leads to the sender.

    By default gloo binds to the address that the host's own name resolves to, which is often the
    loopback address: members on other hosts could not connect.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [
        dist.ProcessGroupGloo.create_device(hostname=find_local_address(peer=spec.address))
    ]
    options._threads = 2
    return options


def find_local_address(*, peer: str) -> str:
    """Return the address of this host that the kernel would use to connect to `peer`."""
    # connect() on a UDP socket only looks up the route; no packet is sent.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 1))
        address: str = probe.getsockname()[0]
        return address


def _make_integers(values: Sequence[int], *, device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=device)


def _to_signed(value: int) -> int:
    """Convert an unsigned 64-bit integer to the signed one with the same bits."""
    return value - 2**64 if value >= 2**63 else value
