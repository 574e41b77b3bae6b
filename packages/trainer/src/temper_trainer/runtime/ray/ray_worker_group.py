"""A role as Ray actors: each rank's actor, and the driver's handle on all of them."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

import ray

from temper_engine_api.distributed.rendezvous import (
    TOKEN_VARIABLE,
    StoreServer,
    bind_collectives,
    get_run_token,
)
from temper_engine_api.registry import load_engine_class
from temper_engine_api.specs import EngineConfig
from temper_trainer.redaction import (
    list_registered_secrets,
    redact_standard_streams,
    register_secrets,
)
from temper_trainer.runtime.ray.ray_calls import RemoteMethod, report_full_store, wait_for_all
from temper_trainer.runtime.worker_group import (
    FullStoreError,
    TrainingWorker,
    WorkerError,
    WorkerGroup,
    call_worker,
    make_worker,
)

T = TypeVar("T")


class RoleHandle(Protocol):
    """Methods of a Ray handle to a RoleActor."""

    call: RemoteMethod
    prepare: RemoteMethod
    rendezvous: RemoteMethod
    configure: RemoteMethod


class RoleActor:
    """One rank in its own process; it creates its worker in `configure`."""

    def __init__(self) -> None:
        self._worker: TrainingWorker | None = None
        self._server: StoreServer | None = None

    def prepare(self, engine_name: str, secrets: Sequence[str]) -> None:
        """Hide secrets of the configuration in what this process prints, and import the engine.

        This takes seconds. Actors of all roles do it in parallel, before the first role builds its
        model.
        """
        register_secrets(secrets)
        redact_standard_streams()
        load_engine_class(engine_name)

    def rendezvous(self, token: str) -> tuple[str, int]:
        """Open the store at which the ranks of the role meet; return its address and port."""
        # Ray knows which address other nodes use to reach this one.
        address = ray.util.get_node_ip_address()
        # StoreServer binds its port immediately, so that no other process can take it.
        self._server = StoreServer(address, token=token)
        return address, self._server.port

    def configure(
        self,
        engine_name: str,
        config: EngineConfig,
        num_threads: int | None,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        token: str,
        is_deprecated: bool,
    ) -> None:
        """Set the variables of the role's process group, and create the worker.

        `token` authenticates the ranks to the store at `address`. For the other arguments see
        `make_worker`.
        """
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK="0",  # Ray shows each actor only its own GPU
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )
        os.environ[TOKEN_VARIABLE] = token
        # gloo and NCCL would otherwise take the first network interface that they find.
        bind_collectives(ray.util.get_node_ip_address())
        self._worker = make_worker(
            engine_name=engine_name,
            config=config,
            num_threads=num_threads,
            is_deprecated=is_deprecated,
        )

    def call(self, function: Callable[..., object], arguments: tuple[object, ...]) -> object:
        """Call a worker function."""
        assert self._worker is not None
        return call_worker(self._worker, function, arguments)


def store_shared_arguments(
    arguments: Sequence[tuple[object, ...]], *, put: Callable[[object], object]
) -> list[object]:
    """Put arguments that several ranks get into the object store, once for each object.

    They may be full weights, or a batch shard that all ranks in a model-parallel replica compute
    on. Others are serialized with the call.
    """
    counts = Counter(map(id, arguments))
    shared = {id(each): each for each in arguments if counts[id(each)] > 1}
    stored = {key: put(each) for key, each in shared.items()}
    return [stored.get(id(each), each) for each in arguments]


class RayWorkerGroup(WorkerGroup):
    """A role whose ranks are Ray actors in a separate process group."""

    def __init__(
        self,
        role: str,
        *,
        actors: Sequence[RoleHandle],
        engine_name: str,
        config: EngineConfig,
        num_threads: int | None,
        timeout_s: float,
        is_deprecated: bool,
    ) -> None:
        super().__init__(role)
        self._timeout_s = timeout_s
        self._actors = list(actors)
        self._settings = (engine_name, config, num_threads)
        self._is_deprecated = is_deprecated
        # Do not wait here, so that the actors of all roles import at the same time.
        secrets = list_registered_secrets()
        self._preparing = [actor.prepare.remote(engine_name, secrets) for actor in self._actors]
        self._is_configured = False

    @property
    def num_workers(self) -> int:
        """Number of ranks."""
        return len(self._actors)

    def run(self, call: Callable[..., T], arguments: Sequence[tuple[object, ...]]) -> list[T]:
        """Call the function on every actor at once; the first failure ends the wait."""
        if not self._is_configured:
            self._configure()
        name = f"{self.role}: {call.__qualname__}"
        with report_full_store(name):
            given = store_shared_arguments(arguments, put=ray.put)
            refs = [
                actor.call.remote(call, each)
                for actor, each in zip(self._actors, given, strict=True)
            ]
        try:
            return cast("list[T]", wait_for_all(refs, timeout_s=self._timeout_s, call=name))
        except FullStoreError:
            raise  # the workers are fine
        except WorkerError:
            self.is_broken = True
            raise

    def close(self) -> None:
        """Kill the actors."""
        # Killed and not asked to exit, because a rank may hang in a collective.
        for actor in self._actors:
            ray.kill(actor)

    def _configure(self) -> None:
        """Create the workers, which then meet at rank 0. Done at the first call, not at the start.

        Until then the actors of other roles import their engines too.
        """
        wait_for_all(self._preparing, timeout_s=self._timeout_s, call=f"{self.role}: start")
        (meeting_point,) = wait_for_all(
            [self._actors[0].rendezvous.remote(get_run_token())],
            timeout_s=self._timeout_s,
            call=f"{self.role} rank 0: rendezvous",
        )
        address, port = cast("tuple[str, int]", meeting_point)
        refs = [
            actor.configure.remote(
                *self._settings,
                rank,
                len(self._actors),
                address,
                port,
                get_run_token(),
                self._is_deprecated,
            )
            for rank, actor in enumerate(self._actors)
        ]
        wait_for_all(refs, timeout_s=self._timeout_s, call=f"{self.role}: configure")
        self._is_configured = True
