"""A channel from one trainer process to the workers of samplers: a process group of its own, beside those of either side.

Rank 0 sends buckets of bytes, every other rank receives each of them. ``nccl`` and ``gloo`` broadcast; ``cuda_ipc`` leaves the bytes where
the sender wrote them, for receivers on the same GPU, and uses gloo to take turns.
"""

import pickle
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from inspect import signature
from typing import Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from temper_trainer.rollout.parcels import Parcel, check_digest, digest_of

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

    def plain(self) -> dict[str, object]:
        """For a message."""
        return asdict(self)


class _Work(Protocol):
    def wait(self) -> bool: ...


class _Group(Protocol):
    """What NCCL's and gloo's process groups share; torch's stubs leave it out."""

    def broadcast(self, tensors: list[Tensor], options: object) -> _Work: ...

    def barrier(self, options: object) -> _Work: ...

    def abort(self) -> None: ...


class Channel:
    """One member's end."""

    def __init__(self, spec: ChannelSpec, *, rank: int, device: torch.device) -> None:
        self._spec = spec
        self._rank = rank
        self._device = device
        timeout = timedelta(seconds=spec.timeout_s)
        store = dist.TCPStore(spec.address, spec.port, spec.size, is_master=rank == 0, timeout=timeout)  # type: ignore[attr-defined]
        if spec.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = cast("_Group", dist.ProcessGroupNCCL(store, rank, spec.size, options))
        else:
            made = dist.ProcessGroupGloo(store, rank, spec.size, _gloo_options(spec, timeout=timeout))  # type: ignore[arg-type]
            self._group = cast("_Group", made)
        self._store = store
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
            self._broadcast(_word(digest, device=self._control_device))

    def receive(self, parcel: Parcel) -> Tensor:
        """[num_bytes] uint8 of the next bucket, until the next call.

        Raises:
            WeightError: it arrived damaged.
        """
        data = self.buffer(parcel.num_bytes)
        if self._spec.backend == "cuda_ipc":
            self._meet()
            data = data.clone()
            torch.cuda.synchronize(self._device)
            self._meet()
        else:
            self._broadcast(data)
        if self._spec.with_digest:
            digest = _word(0, device=self._control_device)
            self._broadcast(digest)
            check_digest(data, Parcel(entries=parcel.entries, num_bytes=parcel.num_bytes, digest=int(digest.item()) % 2**64))
        return data

    def buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 for a bucket of that size, in the same memory every time."""
        assert num_bytes <= self._spec.buffer_bytes, "the channel was opened for smaller buckets"
        return self._buffer[:num_bytes]

    def close(self) -> None:
        """Leave."""
        if self._spec.backend == "nccl":
            self._group.abort()

    @property
    def _control_device(self) -> torch.device:
        return self._device if self._spec.backend == "nccl" else torch.device("cpu")

    def _broadcast(self, data: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([data], options).wait()

    def _digest(self, data: Tensor) -> int | None:
        return digest_of(data) if self._spec.with_digest else None

    def _meet(self) -> None:
        self._group.barrier(dist.BarrierOptions()).wait()

    def _own_buffer(self) -> Tensor:
        return torch.empty(self._spec.buffer_bytes, dtype=torch.uint8, device=self._device)

    def _shared_buffer(self) -> Tensor:
        """The sender's buffer, mapped into every receiver."""
        if self._rank == 0:
            own = self._own_buffer()
            self._store.set("buffer", pickle.dumps(reduce_tensor(own)))  # type: ignore[arg-type]  # bytes are taken too
            return own
        rebuild, arguments = pickle.loads(self._store.get("buffer"))  # noqa: S301 - written by our own sender a moment ago
        given = dict(zip(signature(rebuild).parameters, arguments, strict=True))
        # The same GPU may have another number here, where other ones are visible.
        shared: Tensor = rebuild(**{**given, "storage_device": self._device.index})
        return shared


def open_channel(plain: dict[str, object], *, worker_rank: int, device: torch.device) -> Channel:
    """A receiver's end, from the message that names the channel."""
    spec = ChannelSpec(**plain)  # type: ignore[arg-type]
    return Channel(spec, rank=spec.first_rank + worker_rank, device=device)


def _gloo_options(spec: ChannelSpec, *, timeout: timedelta) -> object:
    """Gloo on the network that leads to the sender: left to itself it takes what the host's own name means, which is often the loopback."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(towards=spec.address))]
    options._threads = 2
    return options


def own_address(*, towards: str) -> str:
    """The address of this machine from which another one is reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 1))
        address: str = probe.getsockname()[0]
        return address


def _word(value: int, *, device: torch.device) -> Tensor:
    """[1] int64 that holds an unsigned number of 64 bits."""
    return torch.tensor([value - 2**64 if value >= 2**63 else value], dtype=torch.int64, device=device)
