"""A key-value store for process groups that requires a token.

The TCPStore of torch listens on every address and answers every client, so anyone who finds the
port can read NCCL's identifiers or overwrite keys. `StoreServer` binds to one address and answers
only clients that know its token. `TokenStore` is the client, a `torch.distributed.Store` that every
process group accepts. Messages are length-prefixed bytes over connections of
`authenticating_listener`: nothing is pickled, and nothing is encrypted.
"""

import functools
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from temper_engine_api.distributed.authenticating_listener import (
    AuthenticatingListener,
    authenticate_socket,
)
from temper_engine_api.errors import EngineStateError

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "TEMPER_STORE_TOKEN"
"""Environment variable with the token, if a `StoreServer` listens at MASTER_ADDR:MASTER_PORT."""
HANDSHAKE_S = 10.0
"""Time limit of the complete handshake with a client."""
_FOREVER_S = 365 * 86400.0


@functools.cache
def get_run_token() -> str:
    """Return this run's random token, created at the first call and never saved."""
    return os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)


class StoreServer:
    """Server that stores the keys and answers `TokenStore` clients from threads in this process."""

    def __init__(self, address: str, *, token: str, port: int = 0) -> None:
        """Start to listen, so that no other process can take the port.

        Args:
            address: Address of this machine; the port is not opened on its other addresses.
            token: Secret that clients must prove to know.
            port: Port; 0 chooses a free one.

        Raises:
            OSError: If the address is not one of this machine, or the port is in use.
        """
        self._values: dict[bytes, bytes] = {}
        self._arrivals: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()
        self._is_abandoned = False
        """True if no client may wait for a key any more."""
        self._listener = AuthenticatingListener(
            address,
            port=port,
            token=token,
            name="the store",
            handshake_s=HANDSHAKE_S,
            serve=self._serve,
        )
        self.address = address
        self.port = self._listener.port

    def close(self) -> None:
        """Stop listening; connected clients are still answered."""
        self._listener.close()

    def abandon(self) -> None:
        """Let all clients that wait for a key fail, now and later: a member cannot join."""
        with self._lock:
            self._is_abandoned = True
            for event in self._arrivals.values():
                event.set()

    def _serve(self, connection: "Connection[bytes, bytes]", origin: str) -> None:
        try:
            with connection:
                while True:
                    method, *parts = _unpack(connection.recv_bytes())
                    connection.send_bytes(_pack(*self._answer(method, *parts)))
        except (EOFError, OSError) as error:
            logger.debug("a client of the store from %s disconnected: %s", origin, error)
        except (ValueError, EngineStateError, struct.error) as error:
            logger.warning("dropped a client of the store from %s: %s", origin, error)

    def _answer(self, method: bytes, *parts: bytes) -> tuple[bytes, ...]:
        """Run one request; the response starts with b"timeout" if a key was not set in time."""
        if method in (b"get", b"wait"):
            wait_s, *keys = parts
            if not self._wait(keys, float(wait_s)):
                return (b"abandoned" if self._is_abandoned else b"timeout",)
            with self._lock:
                return (b"", *(self._values.get(key, b"") for key in keys if method == b"get"))
        if method == b"abandon":
            self.abandon()
            return (b"",)
        if method == b"is_abandoned":
            return b"", b"%d" % self._is_abandoned
        with self._lock:
            if method == b"set":
                for key, value in zip(parts[::2], parts[1::2], strict=True):
                    self._put(key, value)
                return (b"",)
            if method == b"append":
                key, value = parts
                self._put(key, self._values.get(key, b"") + value)
                return (b"",)
            if method == b"add":
                key, amount = parts
                total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
                self._put(key, total)
                return b"", total
            if method == b"compare_set":
                key, expected, desired = parts
                # One lock for reading and writing, so that only one of several ranks can win.
                current = self._values.get(key)
                # As in torch's stores, an absent key is set only if the expected value is empty.
                if current == expected or (current is None and not expected):
                    self._put(key, desired)
                return b"", self._values.get(key, expected)
            if method == b"check":
                return b"", b"%d" % all(key in self._values for key in parts)
            if method == b"delete":
                return b"", b"%d" % (self._values.pop(parts[0], None) is not None)
            if method == b"count":
                return b"", b"%d" % len(self._values)
        raise EngineStateError(
            f"a client of the store sent the request {method!r}, which does not exist: use the "
            "same version of temper-engine-api on all hosts."
        )

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        # Popped, so that events of keys that exist do not pile up over a long run.
        event = self._arrivals.pop(key, None)
        if event is not None:
            event.set()

    def _wait(self, keys: Sequence[bytes], wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        for key in keys:
            while True:
                with self._lock:
                    if key in self._values:
                        break
                    if self._is_abandoned:
                        return False
                    # Under the same lock as the look-up: a key set in between would not wake us.
                    event = self._arrivals.setdefault(key, threading.Event())
                if not event.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return True


_OPEN_STORES: set["TokenStore"] = set()
"""Stores that are not closed yet. A process group or PrefixStore refers only to the C++ object of a
store, whose methods fail once the Python object is collected; this set keeps it alive."""


class TokenStore(Store):
    """Client of a `StoreServer`; thread-safe, one request at a time."""

    def __init__(
        self,
        address: str,
        port: int,
        *,
        token: str,
        timeout: timedelta,
        is_listening: bool = False,
    ) -> None:
        """Connect and check that both sides know the token.

        Args:
            address: Address of the server.
            port: Port of the server.
            token: Secret of the server.
            timeout: Longest time of the connection, and of each later request.
            is_listening: The server was started before, so a refused connection means that it is
                closed; False waits for it.

        Raises:
            EngineStateError: If no server listens there, or the tokens differ.
        """
        super().__init__()
        self.set_timeout(timeout)
        self._arguments = (address, port, token)
        self._lock = threading.Lock()
        where = f"the store at {address}:{port}"
        try:
            client = _connect(
                address, port, timeout_s=timeout.total_seconds(), is_listening=is_listening
            )
            self._connection = authenticate_socket(
                client, token.encode(), is_server=False, timeout_s=timeout.total_seconds()
            )
        except (AuthenticationError, EOFError) as error:
            raise EngineStateError(
                f"{where} has another token, so it belongs to another run: check MASTER_ADDR and "
                "MASTER_PORT."
            ) from error
        except TimeoutError as error:
            raise EngineStateError(
                f"{where} did not answer within {timeout.total_seconds():.0f} s, because its "
                "process hangs or other clients keep it busy: check that process, and isolate the "
                "network of the run."
            ) from error
        except OSError as error:
            raise EngineStateError(
                f"{where} can't be reached ({error}): check that the process that started this "
                "rank still runs, and MASTER_ADDR and MASTER_PORT."
            ) from error
        _OPEN_STORES.add(self)

    def close(self) -> None:
        """Disconnect; process groups that use this store fail afterwards."""
        _OPEN_STORES.discard(self)
        self._connection.close()

    @property
    def _timeout(self) -> timedelta:
        # Read from the C++ half, because set_timeout() of a PrefixStore changes only that.
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]
        return timeout

    def clone(self) -> "TokenStore":
        """Return a client with its own connection, which does not wait for this one."""
        # A blocking get() holds its client's lock, so a clone needs a separate connection.
        address, port, token = self._arguments
        return TokenStore(address, port, token=token, timeout=self._timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._call(b"set", key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys at once."""
        self._call(b"set", *(part for pair in zip(keys, values, strict=True) for part in pair))

    def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to a key's value."""
        self._call(b"append", key, value)

    def get(self, key: str) -> bytes:
        """Wait until a key is set and return its value.

        Raises:
            DistStoreError: If it is not set in time.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys; see `get`."""
        return self._wait_for(b"get", keys, self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            DistStoreError: If one is not set in time.
        """
        self._wait_for(b"wait", keys, timeout or self._timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; return its new value."""
        return int(self._call(b"add", key, str(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value; return its value afterwards."""
        return self._call(b"compare_set", key, expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys are set."""
        return self._call(b"check", *keys)[0] == b"1"

    def delete_key(self, key: str) -> bool:
        """Delete a key; return True if it was set."""
        return self._call(b"delete", key)[0] == b"1"

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._call(b"count")[0])

    def abandon(self) -> None:
        """Let all clients that wait for a key fail, now and later: a member cannot join."""
        self._call(b"abandon")

    def is_abandoned(self) -> bool:
        """Return True if `abandon` was called here or elsewhere."""
        return self._call(b"is_abandoned")[0] == b"1"

    # C++ code of torch looks these two methods up by their C++ names.
    getNumKeys = num_keys
    deleteKey = delete_key

    def has_extended_api(self) -> bool:
        """Return True, so that gloo saves a round trip per rank by `multi_get` and `multi_set`."""
        return True

    def _wait_for(self, method: bytes, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        # In torch a negative timeout means no limit.
        wait_s = timeout.total_seconds() if timeout.total_seconds() >= 0 else _FOREVER_S
        status, *values = self._send(method, repr(wait_s), *keys)
        if status == b"abandoned":
            raise dist.DistStoreError(
                f"a member cannot join, so keys {', '.join(keys)} are not set"
            )
        if status == b"timeout":
            raise dist.DistStoreError(
                f"timed out after {wait_s:g} s waiting for keys {', '.join(keys)}"
            )
        return values

    def _call(self, method: bytes, *parts: str | bytes) -> list[bytes]:
        return self._send(method, *parts)[1:]

    def _send(self, *parts: str | bytes) -> list[bytes]:
        encoded = (part.encode() if isinstance(part, str) else bytes(part) for part in parts)
        with self._lock:
            try:
                self._connection.send_bytes(_pack(*encoded))
                return _unpack(self._connection.recv_bytes())
            except (OSError, EOFError) as error:
                address, port, _ = self._arguments
                raise dist.DistNetworkError(
                    f"the store at {address}:{port} closed the connection ({error}): see the log "
                    "of the process that started this rank."
                ) from error


def store_from_environment(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store, rank and world size of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    The trainer's runtime also sets TEMPER_STORE_TOKEN and listens there with a `StoreServer`.
    Without it, for example under torchrun, the store is torch's `env://` store.

    Raises:
        EngineStateError: If the trainer's store can't be reached.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if token is None:
        joined: tuple[Store, int, int] = next(rendezvous("env://", timeout=timeout))
        return joined
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TokenStore(address, port, token=token, timeout=timeout)
    return store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def bind_collectives(address: str) -> None:
    """Make gloo and NCCL listen on the interface of one address, also in child processes.

    By default they listen on any interface. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are not
    changed if the user has set them.
    """
    interface = find_interface(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # Without "=" NCCL would also accept interfaces whose names start with this one.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def find_interface(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None if unknown or not on Linux."""
    if sys.platform != "linux":
        return None
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _connect(address: str, port: int, *, timeout_s: float, is_listening: bool) -> socket.socket:
    """Connect to a server; unless it should be listening, retry while it does not."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client = socket.create_connection((address, port), timeout=timeout_s)
        except ConnectionRefusedError:
            if is_listening or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            client.settimeout(None)
            return client


def _pack(*parts: bytes) -> bytes:
    """Encode parts as their number, their lengths and their bytes."""
    lengths = struct.pack(f"!{1 + len(parts)}I", len(parts), *map(len, parts))
    return lengths + b"".join(parts)


def _unpack(data: bytes) -> list[bytes]:
    """Decode the parts that `_pack` encoded.

    Raises:
        ValueError: If the lengths do not match the message.
    """
    (count,) = struct.unpack_from("!I", data)
    # Checked first, so that a forged count cannot make struct build a huge format.
    if count > len(data) // 4 - 1:
        raise ValueError(f"a message of {len(data)} bytes is too short for {count} parts")
    lengths = struct.unpack_from(f"!{count}I", data, 4)
    begin, parts = 4 * (1 + count), []
    for length in lengths:
        parts.append(data[begin : begin + length])
        begin += length
    if begin != len(data):
        raise ValueError(f"a message has {len(data)} bytes, but its lengths add up to {begin}")
    return parts
