"""Metrics for Prometheus: an extra of temper-trainer."""

import hmac
import os
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from temper_engine_api.errors import ConfigError
from temper_engine_api.rendezvous import run_token

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class _Gauge(Protocol):
    """What is used of prometheus_client's gauge."""

    def labels(self, **labels: str) -> "_Gauge": ...

    def set(self, value: float) -> None: ...


class PrometheusTracker:
    """Serves the newest value of every metric at ``http://ADDRESS:PORT/metrics`` during the run.

    A scrape needs the bearer token in the token file.

    Example:
        ``actor/loss`` of phase ``rl``, logged at step 7, becomes three gauges::

            temper_actor_loss{metric="actor/loss",phase="rl"} 0.31
            temper_step{phase="rl"} 7.0
            temper_step_timestamp_seconds{phase="rl"} 1.7638e+09
    """

    def __init__(self, address: str, port: int, *, token_file: Path) -> None:
        """Start serving.

        Args:
            address: IPv4 address of this machine to listen on.
            port: To listen on.
            token_file: Written with the token, readable by this user only; removed at the end.

        Raises:
            ConfigError: If prometheus_client is not installed, or the port can't be opened.
        """
        try:
            import prometheus_client  # an extra
        except ImportError as error:
            raise ConfigError(
                "run.prometheus_port is set, but prometheus_client is not installed: "
                "pip install 'temper-trainer[prometheus]', or remove it."
            ) from error
        self._make_gauge = prometheus_client.Gauge
        self._registry = prometheus_client.CollectorRegistry()
        self._step = prometheus_client.Gauge(
            "temper_step", "Step that was logged last.", ["phase"], registry=self._registry
        )
        # A time, not an age: an age would stand still together with a driver that hangs.
        self._step_time = prometheus_client.Gauge(
            "temper_step_timestamp_seconds",
            "Unix time at which the last step was logged; before the first one, of the start.",
            ["phase"],
            registry=self._registry,
        )
        self._step_time.labels(phase="start").set_to_current_time()
        self._gauges: dict[str, _Gauge] = {
            "temper_step": self._step,
            "temper_step_timestamp_seconds": self._step_time,
        }
        # Not the run's token itself: a scraper has no business in the run's other listeners.
        token = hmac.digest(run_token().encode(), b"prometheus", "sha256").hex()
        app = _guarded(prometheus_client.make_wsgi_app(self._registry), token=token)
        try:
            self._server = make_server(address, port, app, _ThreadingServer, _SilentHandler)
        except OSError as error:
            raise ConfigError(
                f"run.prometheus_port is {port}, which can't be opened on run.prometheus_address "
                f"{address}: {error.strerror}. Choose a free port, and an address of this machine."
            ) from error
        self._token_file = token_file
        _write_private(token_file, token)
        self._thread = threading.Thread(
            target=self._server.serve_forever, daemon=True, name="prometheus"
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Set every gauge, then the step and its time."""
        for name, value in metrics.items():
            self._gauge(name).labels(metric=name, phase=phase).set(value)
        self._step.labels(phase=phase).set(step)
        self._step_time.labels(phase=phase).set_to_current_time()

    def begin_anew(self) -> None:
        """Nothing earlier is held."""

    def close(self, *, has_failed: bool) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._token_file.unlink(missing_ok=True)

    def _gauge(self, metric: str) -> _Gauge:
        name = "temper_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
        if name not in self._gauges:
            text = f"{metric}, see docs/metrics.md."
            self._gauges[name] = self._make_gauge(
                name, text, ["metric", "phase"], registry=self._registry
            )
        return self._gauges[name]


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """Answers each scrape in a thread, so that a client that is silent keeps no other waiting."""

    daemon_threads = True


class _SilentHandler(WSGIRequestHandler):
    timeout = 10
    """Seconds in which a client must have sent its request."""

    def log_message(self, format: str, *args: object) -> None:
        """Leave scrapes out of the run's output."""


def _guarded(app: "WSGIApplication", *, token: str) -> "WSGIApplication":
    """Return an application that passes on only requests with the token."""
    expected = f"Bearer {token}".encode()

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode()
        if hmac.compare_digest(given, expected):
            return app(environ, start_response)
        start_response(
            "401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")]
        )
        return [b"The token is in the file prometheus_token of the run folder.\n"]

    return answer


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, also where an older one was open to others."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
