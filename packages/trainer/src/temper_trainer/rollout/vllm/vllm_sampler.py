"""The `vllm` sampler: several servers behind a load balancer.

A server that dies is restarted while the others sample. If its weights cannot be loaded again, it
gets requests again after the next publish. The same applies to servers that join the run.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from temper_engine_api.errors import ConfigError, WeightError
from temper_engine_api.weights import NamedWeight
from temper_trainer.concurrency import DaemonThreads
from temper_trainer.progress import track_wait
from temper_trainer.rollout.sampler import Replica, ReplicaError, check_requests
from temper_trainer.rollout.vllm.completion_checks import check_completion
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.replica_pool import Member, MemberState, ReplicaPool, StartLoad
from temper_trainer.rollout.vllm.vllm_versions import describe_versions, find_untested_warning
from temper_trainer.types import Completion, SamplingRequest

logger = logging.getLogger(__name__)


_LEAVE_POLL_S = 0.2
"""Interval at which to check the open requests of a leaving server."""


class MemberWatch(Protocol):
    """Adds servers to a sampler and removes them while it is in use."""

    def start(self, sampler: "VllmSampler") -> None:
        """Start watching."""
        ...

    def stop(self) -> None:
        """Stop watching."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call that samples requests on one server."""

    member: Member
    restarts_before: int
    """`Member.num_restarts` when the requests were sent."""
    future: "Future[list[Completion]]"


class VllmSampler:
    """A StreamingSampler on vLLM servers. May be called from several threads."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        spec: ServerSpec,
        max_restarts: int,
        watch: MemberWatch | None = None,
        join_timeout_s: float = 0.0,
    ) -> None:
        """Start the replicas.

        Args:
            replicas: Replicas to start.
            spec: Specification for their servers.
            max_restarts: Maximum number of restarts for all replicas together.
            watch: Adds and removes servers during the run.
            join_timeout_s: Time that requests wait for a new server when all have left.

        Raises:
            ReplicaError: If a replica does not start; the other replicas are closed.
        """
        self._pool = ReplicaPool(replicas, max_restarts=max_restarts, join_timeout_s=join_timeout_s)
        self._lock = self._pool.lock
        self._spec = spec
        self._watch = watch
        self._refused: list[Replica] = []
        self._threads = DaemonThreads("requests")
        try:
            # Start in parallel, because building a model takes minutes.
            _run_in_parallel([replica.start for replica in replicas])
        except BaseException:
            self.close()
            raise
        # Remove duplicates, because replicas in the same environment give the same warning.
        for warning in sorted(
            {find_untested_warning(replica.versions) or "" for replica in replicas}
        ):
            if warning:
                logger.warning("%s", warning)
        if watch is not None:
            watch.start(self)

    @property
    def software(self) -> str:
        """Versions of the servers' software, for error messages."""
        return "; ".join(sorted({describe_versions(each.versions) for each in self.replicas}))

    @property
    def weight_version(self) -> int:
        """Weight version that every replica has; 0 before the first publish."""
        return self._pool.version

    @property
    def num_restarts(self) -> int:
        """Number of restarts so far, for all replicas."""
        return self._pool.num_restarts

    @property
    def num_changes(self) -> int:
        """Number of times that a server was added, removed or replaced by a new process."""
        return self._pool.num_changes

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Return one completion per request; requests of a dead replica are repeated."""
        self._check(requests)
        completions: dict[int, Completion] = {}
        pending = list(range(len(requests)))
        while pending:
            pending = self._attempt(requests, pending, completions)
        return [completions[index] for index in range(len(requests))]

    async def sample_one(
        self, request: SamplingRequest, *, on_server: Callable[[int], None] | None = None
    ) -> Completion:
        """Return one request's completion; it is repeated if its replica dies."""
        self._check([request])
        while True:
            call = await self._send_without_blocking(request)
            if on_server is not None:
                on_server(call.member.number)
            try:
                with track_wait(f"{call.member.replica.name}: 1 completion"):
                    (completion,) = await asyncio.wrap_future(call.future)
                name, version = call.member.replica.name, self._pool.version
                check_completion(request, completion, self._spec, name=name, version=version)
                return completion
            except asyncio.CancelledError:
                await _abort(call)
                raise
            except ReplicaError as error:
                await self._threads.call(
                    self._replace_dead,
                    call.member,
                    restarts_before=call.restarts_before,
                    cause=error,
                )
            finally:
                self._pool.release(call.member, [request])

    def _check(self, requests: Sequence[SamplingRequest]) -> None:
        check_requests(
            requests,
            vocab_size=self._spec.vocab_size,
            max_length=self._spec.max_length,
            limit=f"rollout.vllm.max_model_len is {self._spec.max_length}: raise it, or",
        )

    async def _send_without_blocking(self, request: SamplingRequest) -> "_Call":
        # Use a thread only when the lock is taken, to restart a replica or load weights.
        if self._lock.acquire(blocking=False):
            try:
                if self._pool.ready and not self._pool.has_started:
                    return self._send([request])[0][0]
            finally:
                self._lock.release()
        sending = asyncio.wrap_future(self._threads.start(self._send, [request]))
        try:
            return (await asyncio.shield(sending))[0][0]
        except asyncio.CancelledError:
            # The thread sends it all the same.
            ((call, _),) = await sending
            await _abort(call)
            self._pool.release(call.member, [request])
            raise

    def _send(self, requests: Sequence[SamplingRequest]) -> list[tuple["_Call", list[int]]]:
        """Send requests to the servers; return each call with its request indices."""
        self._reload_started()
        # Hold the lock while reading restart counts and sending. Otherwise a server might be
        # restarted in between, and the death of the old process would count for the new one.
        with self._lock:
            self._pool.wait_for_ready()
            return [
                (
                    _Call(
                        member=member,
                        restarts_before=member.num_restarts,
                        future=member.replica.sample([requests[i] for i in indices]),
                    ),
                    indices,
                )
                for member, indices in self._pool.assign(requests)
            ]

    def _reload_started(self) -> None:
        """Load the last weights into servers that were started again.

        Not in the thread that starts one: a transport may be writing new weights then. They wait
        for the request that is being sent here.
        """
        with self._lock:
            claimed = [(each, each.num_restarts) for each in self._pool.claim_started()]
        for member, restarts_before in claimed:
            try:
                self._pool.reload(member)
            except ReplicaError as error:
                self._replace_dead(member, restarts_before=restarts_before, cause=error)
            else:
                with self._lock:
                    self._pool.set_state(member, MemberState.READY)

    def interrupt(self) -> None:
        """Interrupt all open requests; see InterruptibleSampler."""
        with self._lock:
            members = [(each, each.num_restarts) for each in self._pool.busy]
        for member, restarts_before in members:
            try:
                member.replica.call("interrupt").result()
            except ReplicaError as error:
                self._replace_dead(member, restarts_before=restarts_before, cause=error)

    def compute_logprobs(
        self, tokens: Sequence[Sequence[int]], *, temperature: float
    ) -> list[list[float]]:
        """Return the log-prob of every token but the first, after comparing all replicas.

        Raises:
            ConfigError: If the temperature is not 1, because vLLM does not support others here.
            ReplicaError: If all servers have left and no new one joins in time.
            WeightError: If replicas differ.
        """
        if temperature != 1:
            raise ConfigError(
                "vLLM reports log-probs of given tokens only at temperature 1, not at "
                f"{temperature}: use rollout=hf."
            )
        rows = [tuple(row) for row in tokens]
        answers: list[tuple[str, object]] = []
        # All servers may leave at any time, even during the call.
        while not answers:
            with self._lock:
                self._pool.wait_for_ready()
            answers = self._call_ready("compute_logprobs", rows)
        (first_name, first), *others = answers
        assert isinstance(first, list)
        for name, other in others:
            assert isinstance(other, list)
            # `not <=` instead of `>`, so that a NaN fails.
            if not all(
                # Allow differences from other batch sizes. Other weights differ by far more.
                abs(a - b) <= 1e-2
                for one, two in zip(first, other, strict=True)
                for a, b in zip(one, two, strict=True)
            ):
                raise WeightError(
                    f"{first_name} and {name} return different log-probs, so they have different "
                    "weights: report this as a bug."
                )
        return first

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Raise ConfigError, because servers load weights through a transport.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "rollout=vllm loads weights through weight_sync.transport, not as a stream."
        )

    @contextmanager
    def hold_members(self) -> Iterator[None]:
        """Keep servers from joining or leaving during the body."""
        with self._lock:
            yield

    def load_while_sending(
        self,
        receive: StartLoad,
        send: Callable[[], str],
        *,
        version: int,
        reload: StartLoad | None,
    ) -> str:
        """Send weights and load them on all servers at the same time.

        Args:
            receive: Starts to receive weights in one replica.
            send: Sends all weights; returns the reason if that failed, otherwise an empty string.
            version: Version of the weights.
            reload: Loads the same weights into a replica that is restarted later; None if that is
                not possible.

        Returns:
            The reason why a server did not get the weights; empty if all have them. Call
            `restart_dead` and send again.

        Raises:
            WeightError: If a replica refused the weights.
        """
        with self._lock:
            # A server that dies before all servers have the weights cannot load them again.
            self._pool.last_load, self._pool.weights_are_lost = None, True
            receivers = self._pool.receivers
            futures = [receive(member.replica) for member in receivers]
            problem = send()
            for member, future in zip(receivers, futures, strict=True):
                try:
                    self._pool.check_version(member, future.result(), version=version)
                except ReplicaError as error:
                    problem = problem or str(error)
            if problem:
                return problem
            self._pool.version = version
            self._pool.last_load, self._pool.weights_are_lost = reload, reload is None
            for member in receivers:
                self._pool.set_state(member, MemberState.READY)
            return ""

    def restart_dead(self, *, problem: str = "") -> None:
        """Find servers that have died, before weights are sent to all.

        Restart dead servers while the others sample. If no other server is left, wait for the
        restarted one, or for one that joins.

        Args:
            problem: Reason why sending has failed before; a dead server is then expected.

        Raises:
            ReplicaError: If no server has died in spite of a problem, one cannot be restarted, or
                all have left and none joins in time.
        """
        with self._lock:
            self._pool.restart_dead(problem=problem)

    def load(self, start_load: StartLoad, *, version: int) -> None:
        """Load weights into every replica; a replica that is restarted later loads them too.

        Raises:
            WeightError: If a replica refused them, or reports another version.
        """
        with self._lock:
            self._pool.admit_started()
            # Set this first, to restart a replica that dies meanwhile with the new weights.
            self._pool.last_load, previous = start_load, self._pool.last_load
            receivers = [(each, each.num_restarts) for each in self._pool.receivers]
            futures = [start_load(member.replica) for member, _ in receivers]
            for (member, restarts_before), future in zip(receivers, futures, strict=True):
                try:
                    with track_wait(f"{member.replica.name}: weights {version}"):
                        self._pool.check_version(member, future.result(), version=version)
                except ReplicaError as error:
                    self._pool.version = version  # the restarted replica loads and reports it
                    self._replace_dead(
                        member, restarts_before=restarts_before, cause=error, waits=True
                    )
                except WeightError:
                    # A replica that is restarted later must not load weights that were refused.
                    self._pool.last_load = previous
                    raise
            self._pool.version = version
            for member in self._pool.receivers:
                self._pool.set_state(member, MemberState.READY)

    def sleep(self) -> bool:
        """Free memory until the next weights arrive; return False if sleep_level is 0."""
        if not self._spec.sleep_level:
            return False
        self._call_ready("sleep")
        return True

    def call_each(
        self, method: str, arguments: Sequence[tuple[object, ...] | None]
    ) -> list[object]:
        """Call an engine method of all replicas at once; restart dead replicas and call them again.

        Args:
            method: A method of EngineMethods.
            arguments: Arguments for each of `replicas`; None does not call it.

        Returns:
            Each replica's result; None for one that was not called, or has left meanwhile.
        """
        return self._call_members(self._pool.receivers, method, arguments)

    def _call_ready(self, method: str, *arguments: object) -> list[tuple[str, object]]:
        """Call a method of the servers that have the current weights; return names and results."""
        members = self._pool.ready
        results = self._call_members(members, method, [arguments] * len(members))
        return [
            (member.replica.name, result)
            for member, result in zip(members, results, strict=True)
            if member.state == MemberState.READY
        ]

    def _call_members(
        self,
        members: Sequence[Member],
        method: str,
        arguments: Sequence[tuple[object, ...] | None],
    ) -> list[object]:
        results: list[object] = [None] * len(members)
        pending = [i for i, given in enumerate(arguments) if given is not None]
        while pending:
            num_restarts = [member.num_restarts for member in members]
            futures = {i: members[i].replica.call(method, *(arguments[i] or ())) for i in pending}
            pending = []
            for i, future in futures.items():
                try:
                    with track_wait(f"{members[i].replica.name}: {method}"):
                        results[i] = future.result()
                except ReplicaError as error:
                    self._replace_dead(
                        members[i], restarts_before=num_restarts[i], cause=error, waits=True
                    )
                    if members[i] in self._pool.receivers:
                        pending.append(i)
        return results

    @property
    def replicas(self) -> Sequence[Replica]:
        """Replicas that get the next weights, in the order of their numbers."""
        return tuple(member.replica for member in self._pool.receivers)

    def add(self, replica: Replica) -> None:
        """Add a running server; see `ReplicaPool.add`."""
        with self._lock:
            if self._pool.is_closed:
                replica.close()
            else:
                self._pool.add(replica)

    def refuse(self, replica: Replica, *, reason: str) -> bool:
        """Let a server that others have started leave, because it cannot receive weights.

        Returns:
            False if it is the run's own server, the last one, or dead; `restart_dead` then decides.
        """
        with self._lock:
            if replica.can_restart or len(self._pool.receivers) < 2:
                return False
            try:
                replica.call("cached_version").result()
            except ReplicaError:
                return False  # it may join again when it has been started again
            # Add it to `_refused` first: AddressWatch reads both lists without the lock, and would
            # reconnect a server that is in neither.
            self._refused.append(replica)
            self._pool.remove(replica)
        logger.warning(
            "%s has left the run, because it cannot receive weights: %s", replica.name, reason
        )
        replica.close()
        return True

    def has_refused(self, replica: Replica) -> bool:
        """Return True if a server has left because it cannot receive weights."""
        return any(each is replica for each in self._refused)

    def remove(self, replica: Replica) -> None:
        """Let a server leave: it finishes its requests, and is then disconnected."""
        with self._lock:
            member = self._pool.remove(replica)
        if member is None:
            return
        while not self._pool.is_idle(member) and not self._pool.is_closed:
            time.sleep(_LEAVE_POLL_S)
        replica.close()

    def close(self) -> None:
        """End every server; open calls fail and no server is restarted."""
        if self._watch is not None:
            self._watch.stop()
        self._pool.close()
        self._threads.close()

    def _attempt(
        self,
        requests: Sequence[SamplingRequest],
        pending: Sequence[int],
        completions: dict[int, Completion],
    ) -> list[int]:
        """Sample requests once; return the indices of those whose replica died.

        Args:
            requests: All requests in the call.
            pending: Indices of those without a completion.
            completions: Completions by index; new ones are added.
        """
        failed: list[int] = []
        for call, positions in self._send([requests[index] for index in pending]):
            indices = [pending[i] for i in positions]
            name = call.member.replica.name
            try:
                with track_wait(f"{name}: {len(indices)} completions"):
                    answers = call.future.result()
                for index, completion in zip(indices, answers, strict=True):
                    check_completion(
                        requests[index],
                        completion,
                        self._spec,
                        name=name,
                        version=self._pool.version,
                    )
                    completions[index] = completion
            except ReplicaError as error:
                self._replace_dead(call.member, restarts_before=call.restarts_before, cause=error)
                failed += indices
            finally:
                self._pool.release(call.member, [requests[index] for index in indices])
        return failed

    def _replace_dead(
        self, member: Member, *, restarts_before: int, cause: ReplicaError, waits: bool = False
    ) -> None:
        """Restart a dead server; see `ReplicaPool.replace`."""
        with self._lock:
            self._pool.replace(member, restarts_before=restarts_before, cause=cause, waits=waits)


async def _abort(call: _Call) -> None:
    """Abort a request whose caller has left; if its server cannot do that, wait for its end.

    Otherwise a weight sync would find an open request.
    """
    if not call.future.cancel():
        await asyncio.wait([asyncio.wrap_future(call.future)])


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
