"""Connections between processes that both know a secret token.

The handshake is the one of `multiprocessing.connection`, an HMAC challenge in both directions. The
connection is authenticated but not encrypted, and nothing is unpickled.
"""

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 128
"""Maximum number of simultaneous handshakes. Further clients wait in the listener's queue, so that
unknown clients cannot exhaust the process's threads or open files."""


class AuthenticatingListener:
    """Listens at one address and passes on the connections of clients that know a token.

    Each client has its own thread, so a client that sends nothing does not delay the others.
    """

    def __init__(
        self,
        address: str,
        *,
        port: int,
        token: str,
        name: str,
        handshake_s: float,
        serve: Callable[["Connection[bytes, bytes]", str], None],
    ) -> None:
        """Start to listen, so that no other process can take the port.

        Args:
            address: Address of this machine; the port is not opened on its other addresses.
            port: Port; 0 chooses a free one.
            token: Secret that clients must prove to know.
            name: What listens, for messages, such as "the store".
            handshake_s: Time limit of the complete handshake with a client.
            serve: Called with the connection of a client and its address, in the client's thread.

        Raises:
            OSError: If the address is not one of this machine, or the port is in use.
        """
        self._key = token.encode()
        self._name = name
        self._handshake_s = handshake_s
        self._serve = serve
        self._listener = socket.create_server((address, port), backlog=1024)
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._is_closed = False
        self.port: int = self._listener.getsockname()[1]
        # A daemon, because a blocked accept() must not keep the process from ending.
        threading.Thread(target=self._accept, daemon=True, name=f"listener of {name}").start()

    def close(self) -> None:
        """Stop listening; connections that exist stay open."""
        self._is_closed = True
        # On Linux close() alone leaves a thread in accept(), which keeps the port open.
        # macOS refuses to shut down a socket that only listens; there close() is enough.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            self._handshakes.acquire()
            try:
                client, (origin, *_) = self._listener.accept()
                thread = threading.Thread(
                    target=self._authenticate, args=(client, origin), daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    # Otherwise it would wait for an answer until its own timeout.
                    client.close()
                    raise
            except (OSError, RuntimeError) as error:
                # The client disconnected, or a limit of open files or threads was reached. The
                # listener must survive both, because the clients of this run still need it.
                self._handshakes.release()
                if not self._is_closed:
                    logger.warning("%s could not accept a client: %s", self._name, error)
                    time.sleep(0.1)

    def _authenticate(self, client: socket.socket, origin: str) -> None:
        """Pass on the connection of a client that knows the token; disconnect any other."""
        try:
            connection = authenticate_socket(
                client, self._key, is_server=True, timeout_s=self._handshake_s
            )
        except AuthenticationError:
            logger.warning(
                "rejected a client of %s from %s: it has another token", self._name, origin
            )
            return
        except (EOFError, OSError) as error:
            logger.warning(
                "dropped a client of %s from %s, which did not prove that it knows the token: %r",
                self._name,
                origin,
                error,
            )
            return
        finally:
            # Release before serving the client. The limit applies only to clients that have not
            # proved to know the token, and a rank stays connected until the run ends.
            self._handshakes.release()
        self._serve(connection, origin)


def authenticate_socket(
    client: socket.socket, key: bytes, *, is_server: bool, timeout_s: float
) -> Connection:
    """Authenticate both sides of a socket and return it as a connection.

    Raises:
        AuthenticationError: If the other side has another key.
        OSError: If it does not answer within timeout_s, or uses another protocol.
    """
    with client:
        # Requests are small; with Nagle's algorithm each would wait for an acknowledgment.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = _Handshake(client, deadline=time.monotonic() + timeout_s)
        try:
            first, second = deliver_challenge, answer_challenge
            if not is_server:
                first, second = second, first
            # Both use only the two methods that a _Handshake has.
            first(handshake, key)  # type: ignore[arg-type]
            second(handshake, key)  # type: ignore[arg-type]
        except AssertionError as error:  # Python 3.11 checks the format of a challenge by assert
            raise AuthenticationError(str(error)) from error
        client.settimeout(None)
        # Both the socket and the Connection close their descriptor, so the Connection gets a
        # duplicate.
        return Connection(os.dup(client.fileno()))


class _Handshake:
    """Exchange length-prefixed messages over a socket until one deadline.

    A receive timeout of the socket starts again with each byte. A client that sends single bytes
    could occupy one of MAX_HANDSHAKES for hours.
    """

    def __init__(self, client: socket.socket, *, deadline: float) -> None:
        self._client = client
        self._deadline = deadline

    def send_bytes(self, data: bytes) -> None:
        self._limit_next_call()
        self._client.sendall(struct.pack("!I", len(data)) + data)

    def recv_bytes(self, max_length: int) -> bytes:
        (length,) = struct.unpack("!I", self._read(4))
        if length > max_length:
            raise OSError(f"a message has {length} bytes, but must have at most {max_length}")
        return self._read(length)

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            self._limit_next_call()
            # Never more than this message, since the next bytes belong to the Connection that
            # follows.
            received = self._client.recv(num_bytes - len(data))
            if not received:
                raise EOFError
            data += received
        return data

    def _limit_next_call(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        self._client.settimeout(left_s)
