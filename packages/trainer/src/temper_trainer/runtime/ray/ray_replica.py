"""A vLLM server on another node: a Ray actor holds its process, the driver holds the actor."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar, cast

import ray

from temper_engine_api.errors import TemperError
from temper_engine_api.rendezvous import bind_collectives
from temper_trainer.rollout.replica import ReplicaError
from temper_trainer.runtime.vllm_servers import ServerPlan
from temper_trainer.types import Completion, SamplingRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_CONCURRENT_CALLS = 64
"""Of one server; an interrupt must get through while others wait for their completions."""

STOP_TIMEOUT_S = 5.0
"""For an actor to end its server; afterwards it is killed."""


class _Method(Protocol):
    def remote(self, *arguments: object) -> "ray.ObjectRef[object]": ...


class ReplicaHandle(Protocol):
    """What a Ray handle to a ReplicaActor offers."""

    start: _Method
    stop: _Method
    sample: _Method
    call: _Method


class ReplicaActor:
    """Holds one server process on its node; Ray gives it the server's resources."""

    def __init__(self, plan: ServerPlan) -> None:
        bind_collectives(ray.util.get_node_ip_address())
        self._server = plan.make()

    def start(self) -> tuple[int, dict[str, str]]:
        """Start the server; return its process id and the versions of its software."""
        self._server.start()
        assert self._server.process_id is not None
        return self._server.process_id, dict(self._server.versions)

    def stop(self) -> None:
        """End the server and remove its files."""
        self._server.close()

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Completions in order."""
        return self._server.sample(requests).result()

    def call(self, method: str, arguments: tuple[object, ...]) -> object:
        """A method of the server's engine."""
        return self._server.call(method, *arguments).result()


class RayReplica:
    """A Replica in a Ray actor; a death of the actor or of its node is a death of the replica."""

    def __init__(
        self, make_actor: Callable[[], ReplicaHandle], *, name: str, start_timeout_s: float
    ) -> None:
        self._make_actor = make_actor
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._actor: ReplicaHandle | None = None
        self.versions: dict[str, str] = {}
        """See Replica."""
        self.process_id: int | None = None
        """Of the server on its node."""

    @property
    def name(self) -> str:
        """For sentences."""
        return self._name

    def start(self) -> None:
        """A new actor with a new server; the old ones end."""
        self.close()
        self._actor = self._make_actor()
        try:
            # The server has its own limit; the rest is for Ray to start an actor.
            started = ray.get(self._actor.start.remote(), timeout=self._start_timeout_s + 120)
            self.process_id, self.versions = cast("tuple[int, dict[str, str]]", started)
        except ray.exceptions.RayError as error:
            self.close()
            raise _translate_error(error, name=self._name) from error

    def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
        """Completions in order."""
        return cast(
            "Future[list[Completion]]", self._ask(lambda actor: actor.sample.remote(list(requests)))
        )

    def call(self, method: str, *arguments: object) -> "Future[object]":
        """A method of the server's engine."""
        return self._ask(lambda actor: actor.call.remote(method, arguments))

    def close(self) -> None:
        """End the actor and its server."""
        actor, self._actor = self._actor, None
        if actor is not None:
            # Killing the actor ends the server too, but leaves the server's temporary folder.
            try:
                ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                logger.debug("%s could not be asked to stop: %s", self._name, error)
            ray.kill(actor)
            self.process_id = None

    def _ask(self, ask: "Callable[[ReplicaHandle], ray.ObjectRef[object]]") -> "Future[object]":
        future: Future[object] = Future()
        actor = self._actor
        if actor is None:
            future.set_exception(ReplicaError(f"{self._name} is not running."))
            return future
        ref = ask(actor)

        def wait() -> None:
            try:
                future.set_result(ray.get(ref))
            except ray.exceptions.RayError as error:
                future.set_exception(_translate_error(error, name=self._name))
            except Exception as error:  # noqa: BLE001 - such as Ray's end: raised by whoever waits, who would wait for ever
                future.set_exception(error)

        threading.Thread(target=wait, daemon=True, name=self._name).start()
        return future


def _translate_error(error: "ray.exceptions.RayError", *, name: str) -> Exception:
    """The server's own error, or a ReplicaError for the actor's death."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, TemperError):
        return cast("Exception", error.cause)
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return ReplicaError(f"{name} died: {first}")
