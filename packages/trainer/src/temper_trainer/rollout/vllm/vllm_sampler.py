"""The `vllm` sampler: several servers behind a load balancer. A server that dies is restarted."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from temper_engine_api.errors import ConfigError, WeightError
from temper_engine_api.weights import NamedWeight
from temper_trainer.concurrency import DaemonThreads
from temper_trainer.progress import track_wait
from temper_trainer.rollout.load_balancer import LoadBalancer
from temper_trainer.rollout.sampler import Replica, ReplicaError
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.request_checks import check_completion, check_requests
from temper_trainer.rollout.vllm.vllm_versions import describe_versions, find_untested_warning
from temper_trainer.types import Completion, SamplingRequest

logger = logging.getLogger(__name__)

StartLoad = Callable[[Replica], "Future[object]"]
"""Starts to load weights into one replica; the result is the version that the replica then has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A request that was sent to a replica."""

    number: int
    """Number of the replica."""
    replica: Replica
    restarts_before: int
    """Restarts of the replica before; see `_restart`."""
    future: "Future[list[Completion]]"


class VllmSampler:
    """A StreamingSampler on vLLM servers. May be called from several threads."""

    def __init__(self, replicas: Sequence[Replica], *, spec: ServerSpec, max_restarts: int) -> None:
        """Start the replicas.

        Args:
            replicas: Not started yet.
            spec: Spec of their servers.
            max_restarts: Number of restarts of all replicas together before the run stops.

        Raises:
            ReplicaError: If one does not start; the others are ended.
        """
        self._replicas = list(replicas)
        self._spec = spec
        self._balancer = LoadBalancer(len(replicas))
        self._num_restarts = [0] * len(replicas)
        """Restarts of each replica so far.

        A failed call restarts its replica only if this number has not changed since the call was
        sent: another call may have noticed the same death first."""
        self._restarts_left = max_restarts
        # Reentrant: `load` restarts a dead replica while it holds the lock.
        self._lock = threading.RLock()
        self._version = 0
        self._last_load: StartLoad | None = None
        self._last_load_is_lost = False
        self._is_closed = False
        self._threads = DaemonThreads("replicas")
        self.num_restarts = 0
        """Number of restarts."""
        try:
            # In parallel, because building a model takes minutes.
            _run_in_parallel([replica.start for replica in self._replicas])
        except BaseException:
            self.close()
            raise
        # Sorted and without duplicates: replicas of one environment warn about the same versions.
        for warning in sorted(
            {find_untested_warning(replica.versions) or "" for replica in replicas}
        ):
            if warning:
                logger.warning("%s", warning)

    @property
    def software(self) -> str:
        """Versions of the servers' software, for error messages."""
        return "; ".join(sorted({describe_versions(each.versions) for each in self._replicas}))

    @property
    def weight_version(self) -> int:
        """Version of the weights of every replica; 0 before the first publish."""
        return self._version

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Return one completion per request; requests of a dead replica are repeated."""
        check_requests(requests, self._spec)
        completions: dict[int, Completion] = {}
        pending = list(range(len(requests)))
        while pending:
            pending = self._attempt(requests, pending, completions)
        return [completions[index] for index in range(len(requests))]

    async def sample_one(self, request: SamplingRequest) -> Completion:
        """Return the completion of one request; it is repeated if its replica dies."""
        check_requests([request], self._spec)
        while True:
            # The lock is free, unless a replica is restarted or loads weights, which takes long.
            if self._lock.acquire(blocking=False):
                try:
                    call = self._send(request)
                finally:
                    self._lock.release()
            else:
                call = await self._threads.call(self._send, request)
            try:
                with track_wait(f"{call.replica.name}: 1 completion"):
                    (completion,) = await asyncio.wrap_future(call.future)
                name, version = call.replica.name, self._version
                check_completion(request, completion, self._spec, name=name, version=version)
                return completion
            except ReplicaError as error:
                await self._threads.call(
                    self._restart,
                    call.number,
                    restarts_before=call.restarts_before,
                    cause=error,
                )
            finally:
                self._balancer.release(call.number, [request])

    def _send(self, request: SamplingRequest) -> "_Call":
        """Send a request to a replica."""
        with self._lock:
            # Under one lock, as in `_attempt`.
            assigned = self._balancer.assign([request])
            number = next(i for i, positions in enumerate(assigned) if positions)
            replica = self._replicas[number]
            return _Call(
                number=number,
                replica=replica,
                restarts_before=self._num_restarts[number],
                future=replica.sample([request]),
            )

    def interrupt(self) -> None:
        """Interrupt all open requests; see InterruptibleSampler."""
        for number, replica in enumerate(self._replicas):
            restarts_before = self._num_restarts[number]
            try:
                replica.call("interrupt").result()
            except ReplicaError as error:
                self._restart(number, restarts_before=restarts_before, cause=error)

    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """Return the log-prob of every token but the first, after comparing all replicas.

        A replica with old weights would differ from the others.

        Raises:
            ConfigError: If the temperature is not 1: vLLM reports no other for prompts.
            WeightError: If replicas differ.
        """
        if temperature != 1:
            raise ConfigError(
                "vLLM reports log-probs of given tokens only at temperature 1, not at "
                f"{temperature}: use rollout=hf."
            )
        rows = [tuple(row) for row in tokens]
        answers = self._call_all("logprobs", rows)
        first = answers[0]
        assert isinstance(first, list)
        for replica, other in zip(self._replicas, answers, strict=True):
            assert isinstance(other, list)
            # `not <=` instead of `>`, so that a NaN fails.
            if not all(
                # Replicas run equal kernels, but may batch differently; other weights differ by far
                # more.
                abs(a - b) <= 1e-2
                for one, two in zip(first, other, strict=True)
                for a, b in zip(one, two, strict=True)
            ):
                raise WeightError(
                    f"{self._replicas[0].name} and {replica.name} return different log-probs, so "
                    "they have different weights: report this as a bug."
                )
        return first

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Refuse: servers load weights through a transport.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "rollout=vllm loads weights through weight_sync.transport, not as a stream."
        )

    def load_while_sending(
        self,
        receive: StartLoad,
        send: Callable[[], object],
        *,
        version: int,
        reload: StartLoad | None,
    ) -> None:
        """Load weights that all replicas receive while they are sent.

        A replica that dies meanwhile ends the run, because the others wait for it in a collective.

        Args:
            receive: Starts to receive in one replica.
            send: Returns when all weights are sent.
            version: Version of the weights.
            reload: Loads the weights into a replica that is restarted later; None if that is not
                possible.

        Raises:
            ReplicaError: If a replica died.
            WeightError: If a replica refused the weights.
        """
        with self._lock:
            # A replica that dies now leaves the others waiting in a collective, so it is not
            # restarted.
            self._last_load, self._last_load_is_lost = None, True
            futures = [receive(replica) for replica in self._replicas]
            send()
            for number, future in enumerate(futures):
                self._check_version(number, future.result(), version=version)
            self._version = version
            self._last_load, self._last_load_is_lost = reload, reload is None

    def load(self, start_load: StartLoad, *, version: int) -> None:
        """Load weights into every replica; a replica that is restarted later loads them too.

        Raises:
            WeightError: If a replica refused them, or reports another version.
        """
        with self._lock:
            # Set first: a replica that dies meanwhile is restarted with the new weights.
            self._last_load, previous = start_load, self._last_load
            num_restarts = list(self._num_restarts)
            futures = [start_load(replica) for replica in self._replicas]
            for number, future in enumerate(futures):
                try:
                    with track_wait(f"{self._replicas[number].name}: weights {version}"):
                        self._check_version(number, future.result(), version=version)
                except ReplicaError as error:
                    self._version = version  # the restarted replica loads and reports it
                    self._restart(number, restarts_before=num_restarts[number], cause=error)
                except WeightError:
                    # A replica that is restarted later must not load weights that were refused.
                    self._last_load = previous
                    raise
            self._version = version

    def sleep(self) -> bool:
        """Free memory until the next weights arrive; return False if sleep_level is 0."""
        if not self._spec.sleep_level:
            return False
        self._call_all("sleep")
        return True

    def call_each(
        self, method: str, arguments: Sequence[tuple[object, ...] | None]
    ) -> list[object]:
        """Call an engine method of all replicas at once; restart dead replicas and call them again.

        Args:
            method: A method of EngineMethods.
            arguments: Arguments for each replica; None does not call it.
        """
        results: list[object] = [None] * len(self._replicas)
        pending = [number for number, given in enumerate(arguments) if given is not None]
        while pending:
            num_restarts = list(self._num_restarts)
            futures = {
                number: self._replicas[number].call(method, *(arguments[number] or ()))
                for number in pending
            }
            pending = []
            for number, future in futures.items():
                try:
                    with track_wait(f"{self._replicas[number].name}: {method}"):
                        results[number] = future.result()
                except ReplicaError as error:
                    self._restart(number, restarts_before=num_restarts[number], cause=error)
                    pending.append(number)
        return results

    @property
    def replicas(self) -> Sequence[Replica]:
        """All replicas, in the order of their numbers."""
        return tuple(self._replicas)

    def close(self) -> None:
        """End every server; open calls fail and no server is restarted."""
        self._is_closed = True
        for replica in self._replicas:
            replica.close()
        self._threads.close()

    def _attempt(
        self,
        requests: Sequence[SamplingRequest],
        pending: Sequence[int],
        completions: dict[int, Completion],
    ) -> list[int]:
        """Sample requests once; return the indices of those whose replica died.

        Args:
            requests: All requests of the call.
            pending: Indices of those without a completion.
            completions: Completions by index; new ones are added.
        """
        with self._lock:
            # Under one lock: the counts must belong to the processes that get the requests, so that
            # a death is not counted for a process that was restarted in between.
            assigned = self._balancer.assign([requests[index] for index in pending])
            num_restarts = list(self._num_restarts)
            running = {
                number: (
                    [pending[i] for i in positions],
                    self._replicas[number].sample([requests[pending[i]] for i in positions]),
                )
                for number, positions in enumerate(assigned)
                if positions
            }
        failed: list[int] = []
        for number, (indices, future) in running.items():
            try:
                with track_wait(f"{self._replicas[number].name}: {len(indices)} completions"):
                    answers = future.result()
                for index, completion in zip(indices, answers, strict=True):
                    check_completion(
                        requests[index],
                        completion,
                        self._spec,
                        name=self._replicas[number].name,
                        version=self._version,
                    )
                    completions[index] = completion
            except ReplicaError as error:
                self._restart(number, restarts_before=num_restarts[number], cause=error)
                failed += indices
            finally:
                with self._lock:
                    self._balancer.release(number, [requests[index] for index in indices])
        return failed

    def _call_all(self, method: str, *arguments: object) -> list[object]:
        return self.call_each(method, [arguments] * len(self._replicas))

    def _restart(self, number: int, *, restarts_before: int, cause: ReplicaError) -> None:
        """Restart a dead replica with the last weights, once per death.

        Args:
            number: Number of the replica.
            restarts_before: Its number of restarts when the failed call was sent. Another call may
                have noticed the death first.
            cause: The error of the call.

        Raises:
            ReplicaError: If it cannot be restarted.
        """
        with self._lock:
            # Another call has noticed the same death and restarted the replica.
            if self._num_restarts[number] != restarts_before:
                return
            if self._is_closed:
                raise cause
            if self._last_load_is_lost:
                raise ReplicaError(
                    f"{cause}\n"
                    "It cannot be restarted, because its weights are not stored anywhere: resume "
                    "the run, or set weight_sync.transport=shared_memory."
                ) from cause
            if self._restarts_left == 0:
                raise ReplicaError(
                    f"{cause}\n"
                    "rollout.vllm.max_restarts is used up: fix the cause above, or raise it."
                ) from cause
            self._restarts_left -= 1
            self.num_restarts += 1
            self._num_restarts[number] += 1
            replica = self._replicas[number]
            logger.warning(
                "%s\n%s is restarted (%d restarts left)",
                cause,
                replica.name,
                self._restarts_left,
            )
            replica.start()
            # Its prefix cache is empty now, so sessions may move to other replicas.
            self._balancer.forget(number)
            if self._last_load is not None:
                self._check_version(
                    number, self._last_load(replica).result(), version=self._version
                )

    def _check_version(self, number: int, reported: object, *, version: int) -> None:
        if reported != version:
            raise WeightError(
                f"weights {version} were published, but {self._replicas[number].name} has weights "
                f"{reported}."
            )


def _run_in_parallel(calls: Sequence[Callable[[], None]]) -> None:
    """Run each call in a thread; raise the first error when all have ended."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
