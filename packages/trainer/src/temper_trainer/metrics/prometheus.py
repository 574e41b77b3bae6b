"""Serve metrics to Prometheus (``run.prometheus_port``)."""

import contextlib
import hmac
import logging
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from temper_engine_api.distributed.rendezvous import get_run_token
from temper_engine_api.errors import ConfigError, format_install

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""Maximum number of simultaneous connections; a further one replaces the oldest."""
REQUEST_S = 10.0
"""Time limit from accepting a connection until the response is sent."""


class _Gauge(Protocol):
    """The methods of `prometheus_client.Gauge` used here; the package may be absent."""

    def labels(self, **labels: str) -> "_Gauge": ...

    def set(self, value: float) -> None: ...


class PrometheusTracker:
    """Serves the latest value of every metric at ``http://ADDRESS:PORT/metrics`` during the run.

    Requests need the bearer token that is in the token file.

    ``actor/loss`` of phase ``rl``, logged at step 7, becomes three gauges::

        temper_actor_loss{metric="actor/loss",phase="rl"} 0.31
        temper_step{phase="rl"} 7.0
        temper_step_timestamp_seconds{phase="rl"} 1.7638e+09
    """

    def __init__(self, address: str, port: int, *, token_file: Path) -> None:
        """Start serving.

        Args:
            address: IPv4 address of this host to listen on.
            port: Port to listen on.
            token_file: File for the token, readable only by this user; removed at the end.

        Raises:
            ConfigError: If prometheus_client is not installed, or the port can't be opened.
        """
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigError(
                "run.prometheus_port is set, but prometheus_client is not installed: run "
                f"{format_install('temper-trainer[prometheus]')}, or remove it."
            ) from error
        self._make_gauge = prometheus_client.Gauge
        self._registry = prometheus_client.CollectorRegistry()
        self._step = prometheus_client.Gauge(
            "temper_step", "Step that was logged last.", ["phase"], registry=self._registry
        )
        # Report a timestamp, not an age: a driver that hangs would stop updating the age as well.
        self._step_time = prometheus_client.Gauge(
            "temper_step_timestamp_seconds",
            "Unix time at which the last step was logged, or at which the run started.",
            ["phase"],
            registry=self._registry,
        )
        self._step_time.labels(phase="start").set_to_current_time()
        self._gauges: dict[str, _Gauge] = {
            "temper_step": self._step,
            "temper_step_timestamp_seconds": self._step_time,
        }
        # Derived from the run's token, so that a scraper cannot access the run's other servers.
        token = hmac.digest(get_run_token().encode(), b"prometheus", "sha256").hex()
        app = _require_token(prometheus_client.make_wsgi_app(self._registry), token=token)
        try:
            self._server = make_server(address, port, app, _ThreadingServer, _SilentHandler)
        except OSError as error:
            raise ConfigError(
                f"run.prometheus_port is {port}, which can't be opened on run.prometheus_address "
                f"{address}: {error.strerror}. Choose a free port, and an address of this host."
            ) from error
        self._token_file = token_file
        _write_private(token_file, token)
        self._thread = threading.Thread(
            target=self._server.serve_forever, daemon=True, name="prometheus"
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        # Set the step last, so that a scrape in between never reports a step before its metrics.
        for name, value in metrics.items():
            self._gauge(name).labels(metric=name, phase=phase).set(value)
        self._step.labels(phase=phase).set(step)
        self._step_time.labels(phase=phase).set_to_current_time()

    def on_rewind(self) -> None:
        """Do nothing: only the latest values are kept."""

    def close(self, *, has_failed: bool) -> None:
        """Stop serving and remove the token file."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._token_file.unlink(missing_ok=True)

    def _gauge(self, metric: str) -> _Gauge:
        # Prometheus does not allow "/" in names. The label `metric` has the exact name.
        name = "temper_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
        if name not in self._gauges:
            text = f"{metric}, see docs/metrics.md."
            self._gauges[name] = self._make_gauge(
                name, text, ["metric", "phase"], registry=self._registry
            )
        return self._gauges[name]


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """Handles each request in a thread, so that a silent client does not block other clients.

    Unknown clients could exhaust the run's threads or open files. The number of connections
    is therefore limited, and the oldest is dropped for a new one: a scrape takes milliseconds, so
    the oldest is one that sends nothing.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._begin_times: dict[socket.socket, float] = {}  # of open connections, oldest first
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._slots.acquire(blocking=False):
            self._drop_connections(max_left=MAX_CONNECTIONS - 1)
            # The thread of a dropped connection ends at its next read or write.
            if self._slots.acquire(timeout=0.1):
                break
        with self._lock:
            self._begin_times[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Drop the connections whose time is up; called at least every 0.5 s."""
        # A timeout of the socket would start again with each byte.
        self._drop_connections(older_than_s=REQUEST_S)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._lock:
            is_counted = self._begin_times.pop(request, None) is not None
        if is_counted:
            self._slots.release()

    def server_close(self) -> None:
        self._drop_connections(max_left=0)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error of a request, unless its client disconnected or was dropped."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logger.warning("a request to run.prometheus_port failed: %r", error)

    def _drop_connections(
        self, *, max_left: int = MAX_CONNECTIONS, older_than_s: float = math.inf
    ) -> None:
        limit = time.monotonic() - older_than_s
        with self._lock:
            connections = list(self._begin_times.items())
            num_excess = len(connections) - max_left
            for index, (connection, begin_time) in enumerate(connections):
                if index < num_excess or begin_time < limit:
                    # Its thread closes it. The client may have disconnected already.
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: requests are not logged in the run's output."""


def _require_token(app: "WSGIApplication", *, token: str) -> "WSGIApplication":
    """Return an application that forwards only requests with the token."""
    expected = f"Bearer {token}".encode()

    def handle(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        received = str(environ.get("HTTP_AUTHORIZATION", "")).encode()
        if hmac.compare_digest(received, expected):  # takes equally long for any wrong token
            return app(environ, start_response)
        start_response(
            "401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")]
        )
        return [b"The token is in the file prometheus_token of the run folder.\n"]

    return handle


def _write_private(path: Path, text: str) -> None:
    """Write a file with read permission for this user only, also if the file exists with others."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
