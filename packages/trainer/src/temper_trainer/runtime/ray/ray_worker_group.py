"""Roles and sampler as Ray actors, and the driver's handles on them."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar, cast

import ray
import torch
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError, WeightError
from temper_engine_api.registry import load_engine_class
from temper_engine_api.rendezvous import (
    TOKEN_VARIABLE,
    StoreServer,
    bind_collectives,
    get_run_token,
)
from temper_engine_api.specs import EngineConfig, ModelSpec
from temper_engine_api.weights import NamedWeight
from temper_trainer.config.rollout import RolloutConfig
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.rollout.weight_delta import DeltaBucket
from temper_trainer.runtime.ray.stored_bucket import StoredBucket, hand_over_weights
from temper_trainer.runtime.training_worker import TrainingWorker, call_worker, make_worker
from temper_trainer.runtime.worker_group import FullStoreError, WorkerError, WorkerGroup
from temper_trainer.types import Completion, SamplingRequest
from temper_trainer.waits import track_wait

T = TypeVar("T")
DEATH_NOTICE_TIMEOUT_S = 5.0
"""How long a failure waits for news of the other ranks."""
_FULL_STORE_ERRORS = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)


class ActorHandle(Protocol):
    """What a Ray handle to one of the classes below offers."""

    call: "_Method"
    prepare: "_Method"
    rendezvous: "_Method"
    configure: "_Method"
    stage_bucket: "_Method"
    load_staged: "_Method"
    stage_delta: "_Method"
    load_staged_delta: "_Method"


class _Method(Protocol):
    def remote(self, *arguments: object) -> "ray.ObjectRef[object]": ...


class RoleActor:
    """One rank in its own process; makes its worker once it knows its place."""

    def __init__(self) -> None:
        self._worker: TrainingWorker | None = None
        self._server: StoreServer | None = None

    def prepare(self, engine_name: str) -> None:
        """Import the engine, which takes seconds: actors of every role do so side by side, before the first one builds its model."""
        load_engine_class(engine_name)

    def rendezvous(self, token: str) -> tuple[str, int]:
        """Open the store at which the ranks of the role meet.

        Returns:
            This node's address, as Ray knows it, and a port that is the store's from now on.
        """
        address = ray.util.get_node_ip_address()
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
        """Take a place in the role's process group."""
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK="0",
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )
        os.environ[TOKEN_VARIABLE] = token
        bind_collectives(ray.util.get_node_ip_address())
        self._worker = make_worker(
            engine_name=engine_name,
            config=config,
            num_threads=num_threads,
            is_deprecated=is_deprecated,
        )

    def call(self, function: Callable[..., object], arguments: tuple[object, ...]) -> object:
        """Run a function on the worker."""
        assert self._worker is not None
        return call_worker(self._worker, function, arguments)


class SamplerActor:
    """The sampler in its own process."""

    def __init__(
        self,
        model: ModelSpec,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        num_threads: int | None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._sampler = HfSampler(model=model, tokenizer=tokenizer, config=config)
        self._held: dict[int, list[NamedWeight]] = {}
        self._changes: list[DeltaBucket] = []

    def call(self, function: Callable[..., object], arguments: tuple[object, ...]) -> object:
        """Run a function on the sampler."""
        return function(self._sampler, *arguments)

    def stage_bucket(self, bucket: StoredBucket) -> None:
        """Keep a part of a set until it is complete, where the object store has it."""
        self._held[bucket.index] = bucket.weights()

    def load_staged(self, count: int, version: int) -> int:
        """Load the set that was held; returns the version the sampler now has."""
        held, self._held = self._held, {}
        if set(held) != set(range(count)):
            raise WeightError(
                f"the sampler received {len(held)} of {count} buckets of weights: publish the weights again."
            )
        self._sampler.load_weights(
            (weight for i in range(count) for weight in held[i]), version=version
        )
        return self._sampler.weight_version

    def stage_delta(self, bucket: DeltaBucket) -> None:
        """Keep a bucket of changes until all have come."""
        self._changes += [bucket]

    def load_staged_delta(self, base_version: int, version: int) -> int:
        """Load the changes that were held; returns the version the sampler now has."""
        buckets, self._changes = self._changes, []
        self._sampler.load_delta(buckets, base_version=base_version, version=version)
        return self._sampler.weight_version


class RayWorkerGroup(WorkerGroup):
    """A role as Ray actors, each one rank of a process group of its own."""

    def __init__(
        self,
        role: str,
        *,
        actors: Sequence[ActorHandle],
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
        self._preparing = [actor.prepare.remote(engine_name) for actor in self._actors]
        self._has_places = False

    @property
    def num_workers(self) -> int:
        """Ranks of the role."""
        return len(self._actors)

    def run(self, call: Callable[..., T], arguments: Sequence[tuple[object, ...]]) -> list[T]:
        """Call the function on every actor at once; the first failure ends the wait."""
        if not self._has_places:
            self._take_places()
        what = f"{self.role}: {call.__qualname__}"
        with _report_full_store(what):
            refs = [
                actor.call.remote(call, given)
                for actor, given in zip(self._actors, arguments, strict=True)
            ]
        try:
            return cast("list[T]", _wait_all(refs, timeout_s=self._timeout_s, what=what))
        except FullStoreError:
            raise
        except WorkerError:
            self.is_broken = True
            raise

    def close(self) -> None:
        """End the actors."""
        for actor in self._actors:
            ray.kill(actor)

    def _take_places(self) -> None:
        """Tell every rank where rank 0 is, at the first call."""
        _wait_all(self._preparing, timeout_s=self._timeout_s, what=f"{self.role}: start")
        (place,) = _wait_all(
            [self._actors[0].rendezvous.remote(get_run_token())],
            timeout_s=self._timeout_s,
            what=f"{self.role} rank 0: rendezvous",
        )
        address, port = cast("tuple[str, int]", place)
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
        _wait_all(refs, timeout_s=self._timeout_s, what=f"{self.role}: configure")
        self._has_places = True


class _BucketSender:
    """Travels to the actor's rank 0."""

    def __init__(self, sampler: ActorHandle) -> None:
        self._sampler = sampler

    def __call__(self, bucket: StoredBucket) -> "ray.ObjectRef[object]":
        """Put a bucket into the object store, for the sampler's process."""
        with _report_full_store("rollout: receive weights"):
            return self._sampler.stage_bucket.remote(bucket)


class RaySampler:
    """A ``Sampler`` whose work happens in an actor; weights travel through the object store."""

    def __init__(self, actor: ActorHandle, *, timeout_s: float) -> None:
        self._actor = actor
        self._timeout_s = timeout_s
        self._version = -1

    @property
    def weight_version(self) -> int:
        """As the actor reported it after the last set."""
        return self._version

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """One completion for each request, in their order."""
        return cast("list[Completion]", self._call(HfSampler.sample, list(requests)))

    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """Log-prob of each token but the first."""
        return cast(
            "list[list[float]]",
            self._call(_call_logprobs, [tuple(row) for row in tokens], temperature),
        )

    def interrupt(self) -> None:
        """End open calls with what they have."""
        self._call(HfSampler.interrupt)

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Not offered: the actor's rank 0 gives weights to the sampler's process, past the driver.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("the sampler on Ray fetches its weights from the actor, not as a stream.")

    def fetch_weights(
        self, actor: WorkerGroup, *, bucket_bytes: int, with_digest: bool, version: int
    ) -> int:
        """Let rank 0 of the actor write a set into the object store, and load it when it is complete; returns its bytes."""
        arguments = (_BucketSender(self._actor), bucket_bytes, with_digest)
        handed = actor.run(hand_over_weights, [arguments] * actor.num_workers)[0]
        refs = cast("Sequence[ray.ObjectRef[object]]", handed.given)
        _wait_all(refs, timeout_s=self._timeout_s, what="rollout: receive weights")
        ref = self._actor.load_staged.remote(len(refs), version)
        (held,) = _wait_all([ref], timeout_s=self._timeout_s, what="rollout: load weights")
        self._version = cast("int", held)
        return handed.num_bytes

    def load_delta(
        self, buckets: Sequence[DeltaBucket], *, base_version: int, version: int
    ) -> None:
        """Send what changed bucket by bucket; the actor loads it only when it is complete."""
        for bucket in buckets:
            with _report_full_store("rollout: receive changes"):
                ref = self._actor.stage_delta.remote(bucket)
            _wait_all([ref], timeout_s=self._timeout_s, what="rollout: receive changes")
        ref = self._actor.load_staged_delta.remote(base_version, version)
        (held,) = _wait_all([ref], timeout_s=self._timeout_s, what="rollout: load changes")
        self._version = cast("int", held)

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._actor)

    def _call(self, function: Callable[..., object], *arguments: object) -> object:
        what = f"rollout: {function.__qualname__}"
        with _report_full_store(what):
            ref = self._actor.call.remote(function, arguments)
        (result,) = _wait_all([ref], timeout_s=self._timeout_s, what=what)
        return result


def _wait_all(
    refs: "Sequence[ray.ObjectRef[object]]", *, timeout_s: float, what: str
) -> list[object]:
    """Results in order; raises as soon as one of them failed, though others still wait in a collective."""
    pending, deadline = list(refs), time.monotonic() + timeout_s

    def late() -> list[int]:
        return [i for i, ref in enumerate(refs) if ref in pending]

    with track_wait(what, describe_pending=lambda: f"; ranks {late()} have not answered"):
        while pending:
            ready, left = ray.wait(
                pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise WorkerError(
                    f"{what}: ranks {late()} did not answer within runtime.worker_timeout_s = {timeout_s} s."
                )
            pending = left
            failure = _find_failure(ready[0], rank=refs.index(ready[0]), what=what)
            if failure is not None:
                raise _find_death(refs, pending, what=what) or failure
    return list(ray.get(list(refs)))


def _find_death(
    refs: "Sequence[ray.ObjectRef[object]]", pending: "list[ray.ObjectRef[object]]", *, what: str
) -> WorkerError | None:
    """A rank that lost its peer in a collective answers before Ray has noticed that the peer is dead; the dead one is the cause."""
    deadline = time.monotonic() + DEATH_NOTICE_TIMEOUT_S
    while pending:
        ready, pending = ray.wait(
            pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            return None
        failure = _find_failure(ready[0], rank=refs.index(ready[0]), what=what)
        if isinstance(failure, WorkerError):
            return failure
    return None


@contextmanager
def _report_full_store(what: str) -> Iterator[None]:
    """The body puts a call's arguments into the object store.

    Raises:
        FullStoreError: they do not fit.
    """
    try:
        yield
    except _FULL_STORE_ERRORS as error:
        raise _make_full_store_error(what, error) from error


def _make_full_store_error(what: str, error: BaseException) -> FullStoreError:
    return FullStoreError(
        f"{what}: Ray's object store is full, and so is the disk that it spills to ({str(error).splitlines()[0]}). Give it more room "
        "(object_store_memory of ray start, or free the disk of its temporary folder), or send less at once: lower "
        "weight_sync.bucket_bytes or batching.prompts_per_step."
    )


def _find_failure(ref: "ray.ObjectRef[object]", *, rank: int, what: str) -> Exception | None:
    """What an answer failed with; a WorkerError where its worker died."""
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else None
        if isinstance(cause, _FULL_STORE_ERRORS):
            return _make_full_store_error(f"{what}, answer of rank {rank}", cause)
        if cause is not None:
            cause.__cause__ = error
        return cause or error
    except ray.exceptions.RayActorError as error:
        died = WorkerError(
            f"{what}: the worker of rank {rank} died ({str(error).splitlines()[0]})."
        )
        died.__cause__ = error
        return died
    except _FULL_STORE_ERRORS as error:
        return _make_full_store_error(f"{what}, answer of rank {rank}", error)
    except ray.exceptions.RayError as error:
        lost = WorkerError(
            f"{what}: the answer of rank {rank} was lost ({str(error).splitlines()[0]})."
        )
        lost.__cause__ = error
        return lost
    return None


def _call_logprobs(
    sampler: HfSampler, tokens: Sequence[Sequence[int]], temperature: float
) -> list[list[float]]:
    return sampler.logprobs(tokens, temperature=temperature)
