"""A vLLM server on any node of a Ray cluster: a Ray actor that owns the server's process."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, cast

import ray

from temper_engine_api.distributed.rendezvous import bind_collectives
from temper_engine_api.errors import TemperError
from temper_trainer.redaction import redact_standard_streams
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.runtime.ray.ray_calls import RemoteMethod
from temper_trainer.runtime.vllm_servers import ServerPlan
from temper_trainer.types import Completion, SamplingRequest

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 64
"""Concurrent calls of one server: an interrupt must get through while `sample` calls wait."""
STOP_TIMEOUT_S = 5.0
"""Time for an actor to end its server before it is killed."""


class ReplicaHandle(Protocol):
    """Methods of a Ray handle to a ReplicaActor."""

    start: RemoteMethod
    stop: RemoteMethod
    sample: RemoteMethod
    call: RemoteMethod


class ReplicaActor:
    """Owns one server process; Ray reserves the server's resources for it."""

    def __init__(self, plan: ServerPlan) -> None:
        redact_standard_streams()
        bind_collectives(ray.util.get_node_ip_address())
        self._server = plan.create_process()

    def start(self) -> tuple[int, dict[str, str]]:
        """Start the server; return its process id and software versions."""
        self._server.start()
        assert self._server.process_id is not None
        return self._server.process_id, dict(self._server.versions)

    def stop(self) -> None:
        """End the server and remove its temporary files."""
        self._server.close()

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample completions; see Replica."""
        return self._server.sample(requests).result()

    def call(self, method: str, arguments: tuple[object, ...]) -> object:
        """Call a method of the server's engine."""
        return self._server.call(method, *arguments).result()


class RayReplica:
    """A Replica in a Ray actor. If the actor or its node dies, the replica is dead."""

    def __init__(
        self, make_actor: Callable[[], ReplicaHandle], *, name: str, start_timeout_s: float
    ) -> None:
        self._make_actor = make_actor
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._actor: ReplicaHandle | None = None
        self.versions: dict[str, str] = {}
        """Versions of the server's software; see Replica."""
        self.process_id: int | None = None
        """Process id of the server on its node."""

    @property
    def name(self) -> str:
        """Name for messages; see Replica."""
        return self._name

    @property
    def can_restart(self) -> bool:
        """True: the server belongs to the run; see Replica."""
        return True

    def start(self) -> None:
        """Replace the old actor and server, if any, with a new actor and server."""
        self.close()
        try:
            self._actor = self._make_actor()
            # The server has its own timeout; Ray gets two minutes more to start the actor.
            started = ray.get(self._actor.start.remote(), timeout=self._start_timeout_s + 120)
            self.process_id, self.versions = cast("tuple[int, dict[str, str]]", started)
        except ray.exceptions.RayError as error:
            self.close()
            raise _translate_error(error, name=self._name) from error

    def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
        """Sample completions; see Replica."""
        return cast(
            "Future[list[Completion]]",
            self._submit(lambda actor: actor.sample.remote(list(requests))),
        )

    def call(self, method: str, *arguments: object) -> "Future[object]":
        """Call a method of the server's engine."""
        return self._submit(lambda actor: actor.call.remote(method, arguments))

    def close(self) -> None:
        """End the actor and its server."""
        actor, self._actor = self._actor, None
        if actor is not None:
            # ray.kill ends the server too, but would leave the server's temporary folder.
            try:
                ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                logger.debug("%s could not be asked to stop: %s", self._name, error)
            ray.kill(actor)
            self.process_id = None

    def _submit(
        self, submit: "Callable[[ReplicaHandle], ray.ObjectRef[object]]"
    ) -> "Future[object]":
        future: Future[object] = Future()
        # It cannot be cancelled, because Ray would not tell the server.
        future.set_running_or_notify_cancel()
        actor = self._actor
        if actor is None:
            future.set_exception(ReplicaError(f"{self._name} is not running."))
            return future
        ref = submit(actor)

        def wait() -> None:
            try:
                future.set_result(ray.get(ref))
            except ray.exceptions.RayError as error:
                future.set_exception(_translate_error(error, name=self._name))
            except Exception as error:  # noqa: BLE001 - such as the shutdown of Ray: without a result the caller would wait forever
                future.set_exception(error)

        threading.Thread(target=wait, daemon=True, name=self._name).start()
        return future


def _translate_error(error: "ray.exceptions.RayError", *, name: str) -> Exception:
    """Return the server's own error, or a ReplicaError if the actor died."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, TemperError):
        return cast("Exception", error.cause)
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ReplicaError(f"{name} died: {first}")
