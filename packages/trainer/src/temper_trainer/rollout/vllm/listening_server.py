"""Serve one run after the other: ``python -m temper_trainer.rollout.vllm.listening_server``.

Each run that connects gets a process of its own with a new engine, which ends with the connection.
"""

import argparse
import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from temper_engine_api.distributed.authenticating_listener import AuthenticatingListener
from temper_engine_api.errors import ConfigError
from temper_trainer.rollout.vllm import server as run_server
from temper_trainer.rollout.vllm.messages import Hello, encode
from temper_trainer.rollout.vllm.server_addresses import read_token
from temper_trainer.rollout.vllm.server_folders import ServerFolders
from temper_trainer.rollout.vllm.server_group import kill_server_group

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""Time for a server to accept a connection and to prove that it knows the token."""
HANDSHAKE_S = 5.0
"""Time for a run to prove that it knows the token. It is below CONNECT_TIMEOUT_S, so that a run can
still connect after strangers that send nothing have used up the handshakes."""
DEAD_HOST_S = 60
"""Seconds without an answer of a run's host after which its connection ends. Otherwise a host that
has lost its network would occupy the server for 15 minutes to 2 hours."""
_EXIT_GRACE_S = 10.0
"""Time for the process of an earlier run to notice the end of its connection."""
_EXIT_POLL_S = 0.05


class ListeningServer:
    """Accepts the connections of runs, one at a time."""

    def __init__(
        self, host: str, port: int, *, token: str, module: str = run_server.__name__
    ) -> None:
        """Listen at an address; port 0 chooses a free one."""
        self._module = module
        self._connections: queue.SimpleQueue[tuple[Connection[bytes, bytes], str] | None] = (
            queue.SimpleQueue()
        )
        """Connections that the listener's threads have authenticated; None ends `serve_forever`."""
        self._child: subprocess.Popen[bytes] | None = None
        self._folders: ServerFolders | None = None
        self._listener = AuthenticatingListener(
            host,
            port=port,
            token=token,
            name="the server",
            handshake_s=HANDSHAKE_S,
            serve=lambda connection, origin: self._connections.put((connection, origin)),
        )
        self.port = self._listener.port

    def serve_forever(self) -> None:
        """Serve one connection after the other until `close`."""
        # In one thread, so that only it starts and ends processes.
        while (accepted := self._connections.get()) is not None:
            connection, origin = accepted
            with connection:
                self._serve(connection, origin)

    def close(self) -> None:
        """Stop listening, and end the process of the connected run."""
        self._listener.close()
        self._connections.put(None)
        self._end_child()
        self._remove_folders()

    def _serve(self, connection: "Connection[bytes, bytes]", origin: str) -> None:
        """Start the process that serves a run, or tell the run why there is none."""
        try:
            if not self._has_child_exited():
                self._refuse(
                    connection,
                    "it serves another run; wait for its end, or start a server for each.",
                )
                return
            self._end_child()
        except OSError as error:
            # Its workers may still occupy the GPUs.
            logger.warning("could not end the process of the last run: %s", error)
            self._refuse(connection, f"the process of its last run could not be ended ({error}).")
            return
        try:
            _watch_host(connection)
            self._child = self._launch(connection)
        except OSError as error:
            # The disk, memory or the table of processes is full, which may end before the next run.
            logger.warning("could not serve a run on %s: %s", origin, error)
            self._refuse(connection, f"its process could not be started ({error}).")
        else:
            logger.warning("a run on %s has connected", origin)

    def _has_child_exited(self) -> bool:
        """Return True if no run is connected, or the process of the last one exits in time."""
        if self._child is None:
            return True
        deadline = time.monotonic() + _EXIT_GRACE_S
        # WNOWAIT, because another group may get the id of a process that has been waited for, and
        # would be killed by `_end_child`.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self._child.pid, options) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_EXIT_POLL_S)
        return True

    def _end_child(self) -> None:
        """End the process of a run with its workers, which survive if it has crashed."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            kill_server_group(self._child.pid)
        self._child.wait()
        self._child = None

    def _refuse(self, connection: "Connection[bytes, bytes]", problem: str) -> None:
        with contextlib.suppress(OSError):
            connection.send_bytes(encode(Hello(versions={}, problem=problem)))

    def _launch(self, connection: "Connection[bytes, bytes]") -> "subprocess.Popen[bytes]":
        """Start the process that serves a run, which inherits the connection."""
        descriptor = connection.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", self._module, str(descriptor)],
            stdin=subprocess.DEVNULL,
            # Start a new session, so that the process can be killed together with its workers.
            start_new_session=True,
            pass_fds=(descriptor,),
            env=self._make_folders().make_environment(),
        )

    def _make_folders(self) -> ServerFolders:
        """Return empty folders for the next process."""
        self._remove_folders()
        self._folders = ServerFolders.make()
        return self._folders

    def _remove_folders(self) -> None:
        folders, self._folders = self._folders, None
        if folders is not None:
            folders.remove()


def _watch_host(connection: "Connection[bytes, bytes]") -> None:
    """Make the kernel end a connection whose other host does not answer for DEAD_HOST_S.

    The kernel also ends the connection if the run reads nothing for that long while the buffers are
    full, for example because a debugger has stopped the run. Other runs can then use the server.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            # Probes while nothing is sent, and a limit while data is not acknowledged.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, DEAD_HOST_S // 2))
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, DEAD_HOST_S // 6))
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_HOST_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Listen at the given address until the process is ended."""
    parser = argparse.ArgumentParser(
        prog="python -m temper_trainer.rollout.vllm.listening_server",
        description="Start a rollout server for runs that name its address.",
    )
    parser.add_argument(
        "address", metavar="HOST:PORT", help="address to listen at; port 0 chooses a free one"
    )
    address: str = parser.parse_args(arguments).address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        parser.error(f"{address!r} is not HOST:PORT, such as 127.0.0.1:8100")
    try:
        server = ListeningServer(host, int(port), token=read_token())
    except (ConfigError, OSError) as error:
        parser.error(f"{address}: {error}")
    # Its child is in another session, which a signal of the terminal does not reach.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    sys.stdout.write(f"listening at {host}:{server.port}\n")
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 130
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
