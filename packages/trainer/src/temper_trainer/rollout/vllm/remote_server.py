"""Connect to servers that others have started; see `listening_server`."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from temper_engine_api.distributed.authenticating_listener import authenticate_socket
from temper_engine_api.errors import ConfigError, TemperError
from temper_trainer.concurrency import DaemonThreads
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.vllm.listening_server import CONNECT_TIMEOUT_S
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.server_addresses import TOKEN_VARIABLE, read_token
from temper_trainer.rollout.vllm.server_process import ServerProcess

if TYPE_CHECKING:
    from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler

logger = logging.getLogger(__name__)


class RemoteServer(ServerProcess):
    """A Replica that listens at an address; the run ends its connection, not the server."""

    def __init__(
        self,
        spec: ServerSpec,
        *,
        address: str,
        start_timeout_s: float,
        stall_timeout_s: float,
        load_timeout_s: float,
    ) -> None:
        super().__init__(
            spec,
            name=f"server {address}",
            python="",
            log_file=Path(os.devnull),
            start_timeout_s=start_timeout_s,
            stall_timeout_s=stall_timeout_s,
            load_timeout_s=load_timeout_s,
        )
        self.address = address
        """Host and port."""

    @property
    def can_restart(self) -> bool:
        """False: whoever started the server may start it again; see Replica."""
        return False

    def _connect(self) -> "Connection[object, object]":
        host, _, port = self.address.rpartition(":")
        token = read_token().encode()
        try:
            client = socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S)
            return authenticate_socket(client, token, is_server=False, timeout_s=CONNECT_TIMEOUT_S)
        except (AuthenticationError, EOFError) as error:
            raise ConfigError(
                f"{self.name} has another token: set {TOKEN_VARIABLE} to the same value for the "
                "run and for the server."
            ) from error
        except OSError as error:
            raise ReplicaError(
                f"{self.name} can't be reached ({error}): start it with python -m "
                f"temper_trainer.rollout.vllm.listening_server {self.address}, or remove its "
                "address."
            ) from error

    def _log_start(self, seconds: float) -> None:
        logger.info("%s is ready after %.0f s", self.name, seconds)

    def _describe_log(self) -> str:
        return "Its output on its host has the reason."


class AddressWatch:
    """Connects to each server in a list that may change, and disconnects from those removed.

    A server that has died or left is connected again as soon as it listens. One is removed if two
    lists in a row lack it; an empty list is ignored.
    """

    def __init__(
        self,
        read_addresses: Callable[[], Sequence[str]],
        *,
        connected: Sequence[RemoteServer],
        connect: Callable[[str], RemoteServer],
        interval_s: float,
    ) -> None:
        """Store the servers; `start` begins to watch the list.

        Args:
            read_addresses: Returns the current list.
            connected: Servers that the sampler has from the start.
            connect: Creates a server without starting it.
            interval_s: Time between two reads of the list.
        """
        self._read_addresses = read_addresses
        self._connected = {server.address: server for server in connected}
        self._connect = connect
        self._interval_s = interval_s
        self._is_stopped = threading.Event()
        self._threads = DaemonThreads("server-watch")
        self._problems: dict[str, str] = {}
        """Last reason why an address could not be connected."""
        self._last_read: Sequence[str] = tuple(self._connected)
        """Last list that was not empty."""
        self._joining: dict[str, Future[RemoteServer | None]] = {}
        """Attempts to connect, each in a thread, because building a model takes minutes."""
        self._missing: set[str] = set()
        """Connected addresses that the last list lacks."""
        self._has_warned_empty = False

    def start(self, sampler: "VllmSampler") -> None:
        """Begin to watch, in a thread."""
        self._threads.start(self._run, sampler)

    def stop(self) -> None:
        """Stop watching."""
        self._is_stopped.set()
        self._threads.close()

    def _run(self, sampler: "VllmSampler") -> None:
        while not self._is_stopped.wait(self._interval_s):
            try:
                self._update(sampler)
            except Exception:
                # Continue: without this thread, servers could neither join nor leave any more.
                logger.exception("the list of servers could not be applied; it is tried again")

    def _update(self, sampler: "VllmSampler") -> None:
        """Read the list once, and connect and remove servers."""
        try:
            addresses = self._read_current()
        except OSError as error:
            # The file may just be replaced by a new one.
            logger.warning("the addresses of servers cannot be read: %s", error)
            return
        for address, attempt in list(self._joining.items()):
            if attempt.done():
                del self._joining[address]
                if (server := attempt.result()) is not None:
                    self._connected[address] = server
        members = set(map(id, sampler.replicas))
        missing = self._connected.keys() - set(addresses)
        for address, server in list(self._connected.items()):
            # Two lists must lack it, because one may have been read while the file was written.
            if address in missing & self._missing:
                self._threads.start(sampler.remove, server)
                del self._connected[address]
            # Forget a server that has left, so that it can connect again. One that cannot receive
            # weights is not forgotten, because it would be refused again.
            elif id(server) not in members and not sampler.has_refused(server):
                server.close()
                del self._connected[address]
        self._missing = missing
        for address in addresses:
            if address not in self._connected and address not in self._joining:
                self._joining[address] = self._threads.start(self._join, address, sampler)

    def _read_current(self) -> Sequence[str]:
        """Return the list, or the one before if it is empty, which a run cannot use."""
        addresses = self._read_addresses()
        if addresses:
            self._last_read = addresses
        elif not self._has_warned_empty:
            logger.warning("the list of servers is empty, so the run keeps those that it has.")
        self._has_warned_empty = not addresses
        return self._last_read

    def _join(self, address: str, sampler: "VllmSampler") -> RemoteServer | None:
        """Connect a server and add it to the sampler; return None if that failed."""
        try:
            server = self._connect(address)
            try:
                server.start()
                sampler.add(server)
            except BaseException:
                # The server accepts one connection at a time, so this attempt must end before the
                # next one.
                server.close()
                raise
        except (TemperError, ValueError) as error:
            if str(error) != self._problems.get(address):
                logger.warning("a server cannot join the run: %s", error)
            self._problems[address] = str(error)
            return None
        self._problems.pop(address, None)
        return server
