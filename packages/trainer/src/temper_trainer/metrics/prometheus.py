"""Metrics for Prometheus: an extra of temper-trainer."""

import re
from collections.abc import Mapping
from typing import Protocol

from temper_engine_api.errors import ConfigError


class _Gauge(Protocol):
    """What is used of prometheus_client's gauge."""

    def labels(self, **labels: str) -> "_Gauge": ...

    def set(self, value: float) -> None: ...


class PrometheusTracker:
    """Serves the newest value of every metric at ``http://HOST:PORT/metrics``, on every address of this machine, while the run lasts.

    ``actor/loss`` of phase ``rl`` is the gauge ``temper_actor_loss{metric="actor/loss",phase="rl"}``; the step that it was logged at is
    ``temper_step{phase="rl"}``.
    """

    def __init__(self, port: int) -> None:
        try:
            import prometheus_client  # an extra
        except ImportError as error:
            raise ConfigError(
                "run.prometheus_port is set, but prometheus_client is not installed: "
                "pip install 'temper-trainer[prometheus]', or remove it."
            ) from error
        self._make_gauge = prometheus_client.Gauge
        self._registry = prometheus_client.CollectorRegistry()
        self._step = prometheus_client.Gauge("temper_step", "Step that was logged last.", ["phase"], registry=self._registry)
        self._gauges: dict[str, _Gauge] = {"temper_step": self._step}
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"run.prometheus_port is {port}, which can't be listened on: {error.strerror}. Choose a free port."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float], *, phase: str) -> None:
        """Set every gauge, then the step."""
        for name, value in metrics.items():
            self._gauge(name).labels(metric=name, phase=phase).set(value)
        self._step.labels(phase=phase).set(step)

    def begin_anew(self) -> None:
        """Nothing earlier is held."""

    def close(self, *, has_failed: bool) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, metric: str) -> _Gauge:
        name = "temper_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
        if name not in self._gauges:
            text = f"{metric}, see docs/metrics.md."
            self._gauges[name] = self._make_gauge(name, text, ["metric", "phase"], registry=self._registry)
        return self._gauges[name]
