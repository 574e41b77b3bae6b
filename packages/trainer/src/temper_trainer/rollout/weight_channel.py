"""A channel from one trainer process to the workers of samplers: a process group of its own, beside those of either side.

Rank 0 sends buckets of bytes, every other rank receives each of them. ``nccl`` and ``gloo`` broadcast; ``cuda_ipc`` leaves the bytes where
the sender wrote them, for receivers on the same GPU, and uses gloo to take turns.
"""

import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from temper_engine_api.rendezvous import StoreServer, TokenStore
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    TensorEntry,
    check_digest,
    compute_digest,
)
from temper_trainer.rollout.shared_buffer import parse_shared_buffer, share_buffer
from temper_trainer.rollout.weight_delta import (
    PackedDelta,
    TensorDelta,
    count_delta_bytes,
    pack_delta,
)

Backend = Literal["nccl", "gloo", "cuda_ipc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """Where the members of a channel meet."""

    backend: Backend
    """How bytes travel."""
    address: str
    """Of the sender."""
    port: int
    """A free one there."""
    size: int
    """Members, the sender included."""
    buffer_bytes: int
    """Largest bucket."""
    with_digest: bool
    """Whether a checksum follows every bucket."""
    first_rank: int = 0
    """Of the workers of one replica; 0 is the sender."""
    timeout_s: float = 600.0
    """Longest wait for another member."""
    token: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Of the store at which the members meet: the run's."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """Of this channel; cuda_ipc: marks the sender's buffer."""

    def to_dict(self) -> dict[str, object]:
        """For a message."""
        return asdict(self)


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Group(Protocol):
    """What NCCL's and gloo's process groups share; torch's stubs leave it out."""

    def broadcast(self, tensors: list[Tensor], options: object) -> _Work: ...

    def barrier(self, options: object) -> _Work: ...

    def abort(self) -> None: ...


class WeightChannel:
    """One member's end of a channel."""

    def __init__(
        self,
        spec: ChannelSpec,
        *,
        rank: int,
        device: torch.device,
        server: StoreServer | None = None,
    ) -> None:
        """Meet the other members; returns when all of them have come, with nccl at the first transfer.

        Args:
            spec: The same for all members.
            rank: 0 is the sender.
            device: Where the buckets are.
            server: rank 0 only: the store that listens at the spec's port; None opens it.
        """
        self._spec = spec
        self._rank = rank
        self._device = device
        timeout = timedelta(seconds=spec.timeout_s)
        if rank == 0 and server is None:
            server = StoreServer(spec.address, port=spec.port, token=spec.token)
        store = TokenStore(spec.address, spec.port, token=spec.token, timeout=timeout)
        if spec.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = cast("_Group", dist.ProcessGroupNCCL(store, rank, spec.size, options))
        else:
            made = dist.ProcessGroupGloo(
                store,
                rank,
                spec.size,
                _make_gloo_options(spec, timeout=timeout),  # type: ignore[arg-type]
            )
            self._group = cast("_Group", made)
        self._store, self._server = store, server
        self._buffer = self._shared_buffer() if spec.backend == "cuda_ipc" else self._own_buffer()

    def send(self, data: Tensor) -> None:
        """Hand one bucket to every receiver; ``data`` may be used again afterwards."""
        if self._spec.backend == "cuda_ipc":
            torch.cuda.synchronize(self._device)
            self._meet()
            digest = self._digest(data)  # while the receivers read
            self._meet()
        else:
            self._broadcast(data)
            digest = self._digest(data)
        if digest is not None:
            self.send_integers([_to_signed(digest)])

    def receive(self, parcel: PackedBucket) -> Tensor:
        """[num_bytes] uint8 of the next bucket, until the next call.

        Raises:
            WeightError: it arrived damaged.
        """
        data = self.bucket_buffer(parcel.num_bytes)
        if self._spec.backend == "cuda_ipc":
            self._meet()
            data = data.clone()
            torch.cuda.synchronize(self._device)
            self._meet()
        else:
            self._broadcast(data)
        if self._spec.with_digest:
            (digest,) = self.receive_integers(1)
            check_digest(
                data,
                PackedBucket(
                    entries=parcel.entries, num_bytes=parcel.num_bytes, digest=digest % 2**64
                ),
            )
        return data

    def send_delta(
        self,
        changes: Sequence[TensorDelta],
        *,
        entries: Sequence[TensorEntry],
        updated_digest: int | None,
    ) -> int:
        """Hand the changes of one bucket to every receiver; returns how many bytes they take."""
        counts = [change.count for change in changes]
        self.send_integers([*counts, _to_signed(updated_digest or 0)])
        num_bytes = count_delta_bytes(entries, counts)
        if num_bytes:
            data = self.bucket_buffer(num_bytes)
            pack_delta(data, changes, entries)
            self.send(data)
        return num_bytes

    def receive_delta(self, entries: tuple[TensorEntry, ...]) -> tuple[PackedDelta, Tensor]:
        """The next bucket's changes: what they are, and their bytes on the CPU.

        Raises:
            WeightError: they arrived damaged.
        """
        *counts, result = self.receive_integers(len(entries) + 1)
        num_bytes = count_delta_bytes(entries, counts)
        data = torch.empty(0, dtype=torch.uint8)
        if num_bytes:
            data = self.receive(
                PackedBucket(entries=entries, num_bytes=num_bytes, digest=None)
            ).cpu()
        parcel = PackedDelta(
            counts=tuple(counts),
            num_bytes=num_bytes,
            digest=None,
            updated_digest=result % 2**64 if self._spec.with_digest else None,
        )
        return parcel, data

    def send_integers(self, words: Sequence[int]) -> None:
        """Hand numbers of up to 64 bits to every receiver."""
        self._broadcast(_make_integers(words, device=self._control_device))

    def receive_integers(self, count: int) -> list[int]:
        """As many numbers as the sender hands over."""
        found = _make_integers([0] * count, device=self._control_device)
        self._broadcast(found)
        return found.tolist()

    def bucket_buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 for a bucket of that size, in the same memory every time."""
        assert num_bytes <= self._spec.buffer_bytes, "the channel was opened for smaller buckets"
        return self._buffer[:num_bytes]

    def close(self) -> None:
        """Leave."""
        if self._server is not None:
            self._server.close()
        if self._spec.backend == "nccl":
            self._group.abort()  # its watchdog may still ask the store, which therefore stays
        else:
            self._store.close()

    @property
    def _control_device(self) -> torch.device:
        return self._device if self._spec.backend == "nccl" else torch.device("cpu")

    def _broadcast(self, data: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([data], options).wait()

    def _digest(self, data: Tensor) -> int | None:
        return compute_digest(data) if self._spec.with_digest else None

    def _meet(self) -> None:
        self._group.barrier(dist.BarrierOptions()).wait()

    def _own_buffer(self) -> Tensor:
        return torch.empty(self._spec.buffer_bytes, dtype=torch.uint8, device=self._device)

    def _shared_buffer(self) -> Tensor:
        """The sender's buffer, mapped into every receiver."""
        if self._rank == 0:
            own = self._own_buffer()
            self._store.set("buffer", share_buffer(own, nonce=self._spec.nonce).to_json())
            return own
        num_bytes = self._spec.buffer_bytes
        shared = parse_shared_buffer(
            self._store.get("buffer"), nonce=self._spec.nonce, num_bytes=num_bytes
        )
        return shared.map(num_bytes, device=self._device)


def join_channel(
    to_dict: dict[str, object], *, worker_rank: int, device: torch.device
) -> WeightChannel:
    """A receiver's end, from the message that names the channel."""
    spec = ChannelSpec(**to_dict)  # type: ignore[arg-type]
    return WeightChannel(spec, rank=spec.first_rank + worker_rank, device=device)


def _make_gloo_options(spec: ChannelSpec, *, timeout: timedelta) -> object:
    """Gloo on the network that leads to the sender: left to itself it takes what the host's own name means, which is often the loopback."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [
        dist.ProcessGroupGloo.create_device(hostname=find_local_address(towards=spec.address))
    ]
    options._threads = 2
    return options


def find_local_address(*, towards: str) -> str:
    """The address of this machine from which another one is reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 1))
        address: str = probe.getsockname()[0]
        return address


def _make_integers(values: Sequence[int], *, device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=device)


def _to_signed(value: int) -> int:
    """An unsigned number of 64 bits as torch's integers hold it."""
    return value - 2**64 if value >= 2**63 else value
