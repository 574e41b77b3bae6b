"""The servers of a sampler: which of them have the current weights, and what replaces dead ones.

A dead server is restarted while the others sample, and then loads the last weights. If these cannot
be loaded again, it waits for the next ones. A server that joins waits for them, too.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

from temper_engine_api.errors import TemperError, WeightError
from temper_trainer.concurrency import DaemonThreads
from temper_trainer.rollout.load_balancer import LoadBalancer
from temper_trainer.rollout.sampler import Replica, ReplicaError
from temper_trainer.types import SamplingRequest

logger = logging.getLogger(__name__)

StartLoad = Callable[[Replica], "Future[object]"]
"""Starts to load weights into one replica; the result is the version that the replica then has."""


class MemberState(StrEnum):
    """Condition of one server."""

    READY = "ready"
    """Has the current weights and gets requests."""
    STARTING = "starting"
    """Was dead and is started again, while the others sample."""
    WAITING = "waiting"
    """Runs without the current weights; gets the next ones that are published."""
    LEFT = "left"
    """Gets neither requests nor weights any more."""


@dataclass(slots=True, kw_only=True, eq=False)
class Member:
    """One server in a pool."""

    number: int
    """Position in the pool; never reused for another server."""
    replica: Replica
    state: MemberState
    num_restarts: int = 0
    """Restarts so far.

    A failed call reports a new death only if this number has not changed since it was sent."""
    start: "Future[None] | None" = None
    """Start in another thread; None after it has finished and weights were loaded."""


class ReplicaPool:
    """Servers with their states. Callers hold `lock` while they use it."""

    def __init__(
        self, replicas: Sequence[Replica], *, max_restarts: int, join_timeout_s: float
    ) -> None:
        """Create a pool whose servers are all ready.

        Args:
            replicas: Servers, which the caller starts.
            max_restarts: Number of restarts, for all servers together.
            join_timeout_s: How long a call waits for a server to join if all have left.
        """
        # Reentrant: a publish restarts a dead server while it holds the lock.
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._balancer = LoadBalancer(len(replicas))
        self._members = [
            Member(number=i, replica=replica, state=MemberState.READY)
            for i, replica in enumerate(replicas)
        ]
        self._restarts_left = max_restarts
        self._join_timeout_s = join_timeout_s
        self._threads = DaemonThreads("replicas")
        self.version = 0
        """Version of the weights of ready servers."""
        self.last_load: StartLoad | None = None
        """Loads the last published weights into a server; None before the first publish, and if the
        weights are lost."""
        self.weights_are_lost = False
        """True if the last published weights are not stored, so no server can load them again."""
        self.is_closed = False
        self.num_restarts = 0
        """Number of restarts."""
        self.num_changes = 0
        """Number of times that a server was added, removed or replaced by a new process."""

    @property
    def ready(self) -> list[Member]:
        """Servers that get requests."""
        return [each for each in self._members if each.state == MemberState.READY]

    @property
    def busy(self) -> list[Member]:
        """Servers that may have open requests: in state ready or leaving."""
        return [
            each
            for each in self._members
            if each.state == MemberState.READY
            or (each.state == MemberState.LEFT and not self.is_idle(each))
        ]

    @property
    def receivers(self) -> list[Member]:
        """Servers that get the next weights."""
        states = (MemberState.READY, MemberState.WAITING)
        return [each for each in self._members if each.state in states]

    def assign(self, requests: Sequence[SamplingRequest]) -> list[tuple[Member, list[int]]]:
        """Assign requests to ready servers; return each server with its request indices."""
        assigned = self._balancer.assign(requests)
        return [(self._members[i], indices) for i, indices in enumerate(assigned) if indices]

    def release(self, member: Member, requests: Sequence[SamplingRequest]) -> None:
        """Record that requests of a server are finished or failed; needs no lock."""
        self._balancer.release(member.number, requests)

    def wait_for_ready(self) -> None:
        """Return when a server is ready.

        Raises:
            ReplicaError: If there is none, and none joins in time.
        """
        deadline = time.monotonic() + self._join_timeout_s
        while not self.ready:
            self.admit_started()
            self._load_waiting()
            if self.ready:
                return
            is_starting = any(each.state == MemberState.STARTING for each in self._members)
            left_s = None if is_starting else deadline - time.monotonic()
            is_late = left_s is not None and left_s <= 0
            if self.is_closed or is_late or self.weights_are_lost:
                raise ReplicaError(
                    "no server with the current weights is left: see the log for the reasons, and "
                    "resume the run."
                )
            self._changed.wait(left_s)

    def _wait_for_receiver(self) -> None:
        """Return when a server can receive weights; raise ReplicaError if none joins in time."""
        deadline = time.monotonic() + self._join_timeout_s
        while not self.receivers:
            left_s = deadline - time.monotonic()
            if self.is_closed or left_s <= 0:
                raise ReplicaError(
                    "all servers have left, so none can receive the weights: see the log for the "
                    "reasons, and resume the run."
                )
            self._changed.wait(left_s)

    def add(self, replica: Replica) -> None:
        """Add a running server, which gets requests after the next weights are published.

        If no other server is ready, it gets them earlier: the next request first loads the last
        weights into it (`wait_for_ready`).
        """
        member = Member(number=self._balancer.add(), replica=replica, state=MemberState.WAITING)
        self._members.append(member)
        self.num_changes += 1
        self._changed.notify_all()
        logger.info("%s has joined the run", replica.name)
        # Do not load weights here. The watch thread calls this method, and with some transports the
        # actor would have to send the weights while it trains. Before the first publish there are
        # none to load, so a pool without a ready server can use this one at once.
        if not self.ready and self.last_load is None and not self.weights_are_lost:
            self.set_state(member, MemberState.READY)

    def _load_waiting(self) -> None:
        """Load the last weights into waiting servers; remove those that fail."""
        if self.last_load is None or self.weights_are_lost:
            return
        for member in self.receivers:
            try:
                self.reload(member)
                self.set_state(member, MemberState.READY)
            except TemperError as error:
                logger.warning("%s cannot load the current weights: %s", member.replica.name, error)
                self.set_state(member, MemberState.LEFT)

    def remove(self, replica: Replica) -> Member | None:
        """Stop sending requests and weights to a server; return None if it has left already."""
        for member in self._members:
            if member.replica is replica and member.state != MemberState.LEFT:
                self.set_state(member, MemberState.LEFT)
                logger.info("%s leaves the run", replica.name)
                return member
        return None

    def is_idle(self, member: Member) -> bool:
        """Return True if a server has no open request."""
        return self._balancer.load[member.number] == 0

    def set_state(self, member: Member, state: MemberState) -> None:
        """Change a server's state."""
        member.state = state
        if state == MemberState.READY:
            self._balancer.enable(member.number)
            self._changed.notify_all()
        else:
            self._balancer.disable(member.number)
            self.num_changes += 1

    def replace(
        self, member: Member, *, restarts_before: int, cause: ReplicaError, waits: bool
    ) -> None:
        """Restart a dead server, once per death.

        Args:
            member: The server.
            restarts_before: Its number of restarts when the failed call was sent. Another call may
                have noticed the death first.
            cause: The call's error.
            waits: Restart it here and load the last weights, if possible. False starts it in a
                thread; see `claim_started`.

        Raises:
            ReplicaError: If it cannot be restarted, and no other server has the weights.
        """
        # Another call has noticed the same death.
        if member.num_restarts != restarts_before or member not in self.receivers:
            return
        if self.is_closed:
            raise cause
        if self.weights_are_lost and not [each for each in self.ready if each is not member]:
            raise ReplicaError(
                f"{cause}\n"
                "It cannot be restarted, because its weights are not stored anywhere: resume "
                "the run, or set weight_sync.transport=shared_memory."
            ) from cause
        if self.weights_are_lost or not member.replica.can_restart or not waits:
            self._suspend(member, cause=cause)
            return
        self._count_restart(member, cause=cause)
        member.replica.start()
        self.reload(member)

    @property
    def has_started(self) -> bool:
        """True if a server was started again and is not admitted yet."""
        return any(
            each.state == MemberState.STARTING and each.start is not None and each.start.done()
            for each in self._members
        )

    def claim_started(self) -> list[Member]:
        """Return servers that were started again and can load the last weights, each of them once.

        Raises:
            ReplicaError: If one did not start, and no restart is left.
        """
        self.admit_started()
        claimed = [
            each
            for each in self._members
            if each.state == MemberState.WAITING and each.start is not None
        ]
        if self.weights_are_lost:
            return []
        for member in claimed:
            member.start = None
        return claimed

    def restart_dead(self, *, problem: str) -> None:
        """Find servers that have died; see `VllmSampler.restart_dead`."""
        self.admit_started()
        receivers = self.receivers
        dead: list[tuple[Member, ReplicaError]] = []
        answers = [member.replica.call("cached_version") for member in receivers]
        for member, answer in zip(receivers, answers, strict=True):
            try:
                answer.result()
            except ReplicaError as error:
                dead.append((member, error))
        if problem and not dead:
            raise ReplicaError(problem)
        for member, cause in dead:
            self._suspend(member, cause=cause)
        if not self.receivers:
            self.admit_started(waits=True)
            self._wait_for_receiver()

    def admit_started(self, *, waits: bool = False) -> None:
        """Let servers that were started again get the next weights.

        Args:
            waits: Wait for those that are still starting.

        Raises:
            ReplicaError: If one did not start, and no restart is left.
        """
        for member in self._members:
            while member.state == MemberState.STARTING:
                assert member.start is not None
                if not member.start.done() and not waits:
                    break
                try:
                    member.start.result()
                    self.set_state(member, MemberState.WAITING)
                except ReplicaError as error:
                    self._suspend(member, cause=error)

    def check_version(self, member: Member, reported: object, *, version: int) -> None:
        """Raise WeightError if a server reports another version than was published."""
        if reported != version:
            raise WeightError(
                f"weights {version} were published, but {member.replica.name} has weights "
                f"{reported}."
            )

    def close(self) -> None:
        """End every server; none is restarted. Needs no lock."""
        self.is_closed = True
        for member in self._members:
            member.replica.close()
        self._threads.close()

    def _suspend(self, member: Member, *, cause: ReplicaError) -> None:
        """Assign no requests to a dead server, and start it again in a thread."""
        if not member.replica.can_restart:
            logger.warning("%s\n%s has left the run", cause, member.replica.name)
            self.set_state(member, MemberState.LEFT)
            return
        self._count_restart(member, cause=cause)
        self.set_state(member, MemberState.STARTING)
        member.start = self._threads.start(member.replica.start)
        member.start.add_done_callback(self._notify)

    def _notify(self, _: "Future[None]") -> None:
        with self.lock:
            self._changed.notify_all()

    def _count_restart(self, member: Member, *, cause: ReplicaError) -> None:
        """Count a restart of a server.

        Raises:
            ReplicaError: If there were as many as are allowed.
        """
        if self._restarts_left == 0:
            raise ReplicaError(
                f"{cause}\nrollout.vllm.max_restarts is used up: fix the cause above, or raise it."
            ) from cause
        self._restarts_left -= 1
        self.num_restarts += 1
        self.num_changes += 1
        member.num_restarts += 1
        # Its prefix cache is empty, so sessions may move to other servers.
        self._balancer.forget(member.number)
        logger.warning(
            "%s\n%s is restarted (%d restarts left)",
            cause,
            member.replica.name,
            self._restarts_left,
        )

    def reload(self, member: Member) -> None:
        """Load the last weights into a server, if there are any; needs no lock."""
        if self.last_load is not None:
            self.check_version(
                member, self.last_load(member.replica).result(), version=self.version
            )
