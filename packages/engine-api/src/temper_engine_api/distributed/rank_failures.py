"""Report the exception of one rank to the others, and agree whether the process group survives.

When a rank raises in a collective call, the other ranks wait for it. `RankFailures` ends this wait.
While calls succeed, ranks use the store only to publish the end of each checkpoint write or read.
After an exception:

1. The rank writes its number, the call and the message to the store of the default process group,
   with the number of collectives that it has started in each group.
2. It waits up to AGREEMENT_S for reports from the other ranks. If every rank raised in the same
   call and after the same collectives, no message is in flight: the group survives, and each rank
   raises its own exception.
3. Otherwise it declares the group broken in the store. The first declaration wins, so that all
   ranks name the same failure. The rank then closes its connections to the other ranks, including
   connections of the group's other engines. When ranks wait in a gloo collective, it fails at once,
   and they raise RankFailedError with the failure from the store. With NCCL, a thread on each rank
   reads the declaration and aborts the collectives; the ranks wait for each other to do so. Every
   call checks for a declaration before it returns. A call that did not wait for its collectives may
   have returned by then; the next one raises.
4. Every later call of a rank in a broken group raises the same RankFailedError.

`reported_calls` encloses an engine's public methods. `train_mode()`, `eval_mode()`,
`disable_adapter()` and the weight and state streams count as one call until they are closed. If a
call inside them has reported an exception, they do not report it again.

A file system error, such as a full disk, raises on one rank only. Ranks exchange such errors when
they have written or read a checkpoint, and the group survives, unless another rank waits in a
collective that the failed rank did not start. To detect this, a failed rank publishes the number of
collectives that it has started, and a thread on each other rank compares it with its own number.

`init_model` also reports, although its groups do not exist yet. Ranks wait for each other in
`process_group.join_default_group`, where they also check for a declaration. After that, a failed
rank closes the connections opened since `init_model` began.

Each rank counts its engines and groups to number them. When a rank raises before `init_model`, the
other ranks time out and count a failed start. The rank that raised counts this start in its next
call to `init_model`, which raises RankFailedError, so that the following engine has the same number
on all ranks. When other code created the default group and its store is used again, the numbers
stay different: start new processes.

Threads that save in the background have their own group and their own `RankFailures`. A failure
between two collectives of a save breaks only that group. The engine can still be used, except to
save in the background.

Pipeline stages also exchange messages outside of collectives, in forward and backward passes. The
number of collectives does not tell which messages are in flight, and only closing the connection
stops a stage that waits for a message. With pipeline stages, a group therefore survives only if no
rank raised during its passes.
"""

import itertools
import json
import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from temper_engine_api.distributed.checkpoint_part import CheckpointPart
from temper_engine_api.distributed.rank_connections import (
    abort_device_collectives,
    close_connections,
    count_collectives,
    end_interrupted_batches,
    ends_at_once,
    find_new_connections,
    has_device_groups,
    has_lost_connection,
    list_own_connections,
)
from temper_engine_api.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    EngineStateError,
    RankFailedError,
)
from temper_engine_api.topology import Topology

AGREEMENT_S = 4.0
"""Time to wait for reports from the other ranks. They must raise within 10 s; less than half of
that leaves time for a slow store or a busy host."""
WATCH_INTERVAL_S = 1.0
"""Interval at which a rank with NCCL checks the store for a declaration."""
ABORT_WAIT_S = 3 * WATCH_INTERVAL_S
"""Time for which a rank with NCCL waits for the others before it aborts its collectives. They learn
of a failure within WATCH_INTERVAL_S; a rank whose process has ended never does."""
BuildStage = Literal["begin to build", "build"]
"""Points of `init_model` at which ranks wait for each other."""
MAX_MESSAGE = 2000
"""Characters of an exception's message that other ranks see."""
_PREFIX = "temper_engine_api/failure"
_POLL_S = 0.02
_CAUSE_WAIT_S = 1.0
"""Time to wait, after losing a connection, for a report from the rank that closed it."""
_REPORTED_AT = "_temper_reported_at"
"""Attribute of an exception: event number of its report. Enclosing calls have a lower number and
therefore do not report the exception again."""
_LOG = logging.getLogger(__name__)
_EVENTS = itertools.count(1)
_SURVIVES = "survives"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Report of a rank's exception, as the other ranks read it."""

    rank: int
    call_numbers: list[int]
    """Number of this engine call, counted from 1. Inside another call, such as `train_mode()`, the
    enclosing call's number comes first."""
    where: str
    """Call and position, such as `forward_backward_batch() at micro-batch 2 of 3`."""
    message: str
    """Type and message of the exception."""
    num_collectives: dict[str, int]
    """Collectives that this rank has started, by group and device."""
    may_have_messages: bool
    """True if pipeline messages to or from this rank may be in flight."""
    has_lost_connection: bool
    """True if the exception reports a lost connection or a timeout."""

    def __str__(self) -> str:
        return f"rank {self.rank} raised in {self.where}: {self.message}"


@dataclass(slots=True, kw_only=True)
class _GroupFailure:
    """Failure state of a default process group, shared by all engines that use the group."""

    store: Store
    declaration_key: str
    broken: str | None = None
    """Failure message if this rank has left the group, otherwise None."""
    breaking: threading.Lock = field(default_factory=threading.Lock)
    engines: "weakref.WeakSet[RankFailures]" = field(default_factory=weakref.WeakSet)
    """Engines that use the group. Each one lists its own connections."""

    @classmethod
    def make_for_next_group(cls, store: Store, *, rank: int) -> "_GroupFailure":
        # A store may outlive a broken group and serve the next one, so declarations need a number.
        # Ranks create groups in the same order and therefore agree on it.
        group_number = store.add(f"{_PREFIX}/groups/{rank}", 1)
        return cls(store=store, declaration_key=f"{_PREFIX}/declared/{group_number}")


_GROUP_FAILURES: "weakref.WeakKeyDictionary[ProcessGroup, _GroupFailure]"
_GROUP_FAILURES = weakref.WeakKeyDictionary()


class RankFailures:
    """Exchange failures between the ranks of one engine; see the module docstring."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        watches: bool = False,
        group: _GroupFailure | None = None,
        background_prefix: str | None = None,
    ) -> None:
        """Join the other ranks, without waiting for them.

        Args:
            store: Store that all ranks share.
            rank: Global rank.
            world_size: Number of ranks.
            watches: Check for declarations on a thread and at the end of each call. Needed for
                device collectives, which end without an exception when they are aborted.
            group: Failure state of the default group; None if the group is created later.
            background_prefix: Prefix of keys if these are the failures of saving threads.
        """
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._has_stages = False
        self._watches = watches
        self._in_background = background_prefix is not None
        self._before_start = None if self._in_background else list_own_connections()
        """Connections that existed before `init_model`; None after it."""
        # Ranks build their engines in the same order, so they agree on this number.
        self._prefix = background_prefix or (
            f"{_PREFIX}/{store.add(f'{_PREFIX}/engines/{rank}', 1)}"
        )
        self._group = group or _GroupFailure.make_for_next_group(store, rank=rank)
        self._num_calls = [0]
        """Number of calls so far, then for each open call the number of calls inside it."""
        self._num_parts = 0
        self._num_survived = 0
        self._position = ""
        self._may_have_messages = False
        with self._group.breaking:  # a watching thread may be reading the set
            self._group.engines.add(self)

    @classmethod
    def join(cls) -> "RankFailures | None":
        """Join the ranks of the default process group; return None for a single process."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        group = _GROUP_FAILURES.get(_get_default_group())
        failures = cls(
            # torch has no public accessor for the store of the default group.
            _get_default_store() if group is None else group.store,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            group=group,
        )
        failures.group_joined()
        return failures

    def join_in_background(self, connections: set[str]) -> "RankFailures":
        """Return the failures of the engine's saving threads. They leave its other calls alone.

        Args:
            connections: Connections of the group that these threads use.
        """
        prefix = f"{self._prefix}/background"
        failures = RankFailures(
            self._store,
            rank=self._rank,
            world_size=self._world_size,
            group=_GroupFailure(store=self._store, declaration_key=f"{prefix}/declared"),
            background_prefix=prefix,
        )
        failures.publish_connections(connections)
        return failures

    def group_joined(self) -> None:
        """Publish the default group's connections, which a failed rank closes."""
        _GROUP_FAILURES.setdefault(_get_default_group(), self._group)
        self.publish_connections(list_own_connections())
        if "nccl" in dist.get_backend_config() and not self._watches:
            self._watches = True
            threading.Thread(
                target=_watch, args=(weakref.ref(self),), name="rank-failures", daemon=True
            ).start()

    def mark_engine_built(self, topology: Topology) -> None:
        """Record that `init_model` succeeded, and publish all of the engine's connections."""
        self._has_stages = topology.pp.size > 1
        self._before_start = None
        self.publish_connections(list_own_connections())

    def start_failed(self) -> None:
        """Record that `init_model` raised, so that no later connection counts as the engine's."""
        self._before_start = None

    def publish_connections(self, connections: set[str]) -> None:
        """Tell the other ranks which connections this one has, as `local remote`."""
        self._store.set(f"{self._prefix}/connections/{self._rank}", json.dumps(sorted(connections)))

    def wait_for_arrivals(self, stage: BuildStage, *, timeout_s: float) -> None:
        """Wait until every rank calls this for the same stage, or one has failed in `init_model`.

        Args:
            stage: Stage of `init_model` that this rank has reached.
            timeout_s: Time limit.

        Raises:
            RankFailedError: If a rank has failed.
            CollectiveTimeoutError: If a rank does not arrive within the limit.
        """
        keys = [f"{self._prefix}/{stage}/{rank}" for rank in range(self._world_size)]
        if stage == "build":
            # Another rank may fail before this one returns from `init_model`. It must be able to
            # find and close the connections on which this rank waits.
            self.publish_connections(list_own_connections())
        self._store.set(keys[self._rank], "")
        deadline = time.monotonic() + timeout_s
        while True:
            are_here = self._store.check(keys)
            # Check even when all ranks have arrived, because one may have failed since.
            self._learn_of_declaration()
            self.check()
            if are_here:
                return
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                # No rank is missing if the last one has just arrived. Continue like that rank.
                if missing:
                    raise CollectiveTimeoutError(
                        f"ranks {missing} did not {stage} their engine within {timeout_s:.0f} "
                        "s: see their logs, or increase collective_timeout_s."
                    )
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise RankFailedError if this rank knows that the group is broken; no store access."""
        if self._group.broken is not None:
            raise RankFailedError(self._group.broken)

    def check_store(self) -> None:
        """Check like `check`, and also whether another rank has declared the group broken."""
        self._learn_or_lose_store()
        self.check()

    def set_position(self, position: str) -> None:
        """Set the position within the call, such as ` at micro-batch 2 of 3`, for messages."""
        self._position = position

    @contextmanager
    def track_messages(self) -> Iterator[None]:
        """Track whether pipeline messages may be in flight; use it around a call's passes."""
        self._may_have_messages = self._has_stages
        yield
        # Not in a finally block: after an exception, messages may be unsent or unread. With
        # pipeline stages the group then breaks.
        self._may_have_messages = False

    @contextmanager
    def report_failure(
        self, call: str, *, only: Callable[[BaseException], bool] = lambda error: True
    ) -> Iterator[None]:
        """Enclose a collective call: report its exception, and take part in the agreement.

        Args:
            call: Name for messages, such as `optimizer_step()`.
            only: Returns False for exceptions that the ranks exchange by themselves.

        Raises:
            RankFailedError: If another rank failed. An exception of this rank is raised unchanged.
        """
        self.check()
        begin = take_event_number()
        self._num_calls[-1] += 1
        self._num_calls.append(0)
        depth = len(self._num_calls)
        # Don't reset the flag for messages here: this call may be inside another one, for example
        # in a loss, while messages are in flight.
        outer_position, self._position = self._position, ""
        try:
            yield
            # An aborted device collective returns without a result and without an error. The
            # watching thread aborts collectives, and so does NCCL when it notices a closed
            # connection before the thread has read the declaration.
            if self._watches:
                self._learn_or_lose_store()
            self.check()
        except GeneratorExit:
            # Not an error: a generator was closed before its end.
            raise
        except BaseException as error:
            if only(error):
                self.handle(error, where=call + self._position, begin=begin)
            raise
        finally:
            self._position = outer_position
            # Streams may close in another order than they opened.
            del self._num_calls[depth - 1 :]

    def report_abandoned(self, call: str) -> None:
        """Report that this rank stopped reading a collective stream before its end.

        If all ranks stop after the same item, the group survives.

        Args:
            call: Call that returned the stream, such as `export_state()`.
        """
        self.handle(
            EngineStateError("the stream was not read to its end, or its reader raised"), where=call
        )

    @contextmanager
    def report_interrupt(self, call: str) -> Iterator[None]:
        """Enclose a wait for a background save: report only interrupts.

        Ranks exchange CheckpointErrors of the save separately, so this marks them as reported for
        the enclosing calls. It can be used in a broken group.
        """
        begin = take_event_number()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                self.handle(error, where=call, begin=begin)
            elif isinstance(error, CheckpointError):
                setattr(error, _REPORTED_AT, take_event_number())
            raise

    @contextmanager
    def report_unfinished(self, call: str, *, timeout_s: float) -> Iterator[None]:
        """Enclose the write or read of a checkpoint, after which ranks exchange their errors.

        After an error on this rank, wait until the other ranks have ended the call, too. The group
        breaks if another rank has started more collectives than this one.

        Args:
            call: Name for messages.
            timeout_s: Time limit for the other ranks.

        Raises:
            RankFailedError: If another rank left a collective of the call.
        """
        with self.report_failure(call, only=ends_at_once):
            part, has_ended = self._begin_part(), threading.Event()
            watcher = threading.Thread(
                target=self._watch_part, args=(part, has_ended), name="part-failures", daemon=True
            )
            try:
                watcher.start()
                yield
            except BaseException as error:
                if not ends_at_once(error):
                    self._end_part(part, error, where=call, timeout_s=timeout_s)
                raise
            else:
                try:
                    part.publish_end(failure=None)
                except dist.DistError as error:
                    # The files are complete. Later calls report the lost store.
                    _LOG.warning("%s has ended, but %s", call, self._describe_lost_store(error))
            finally:
                has_ended.set()
                if watcher.is_alive():
                    watcher.join()

    def _begin_part(self) -> CheckpointPart:
        self._num_parts += 1
        return CheckpointPart(
            store=self._store,
            prefix=self._prefix,
            number=self._num_parts,
            rank=self._rank,
            world_size=self._world_size,
            in_background=self._in_background,
            begin=count_collectives(in_background=self._in_background),
        )

    def _end_part(
        self, part: CheckpointPart, error: BaseException, *, where: str, timeout_s: float
    ) -> None:
        """Publish the error, and wait until the other ranks have ended the call or left the group.

        Waiting for minutes is normal, because other ranks may still write.
        """
        report = str(self._make_report(error, where=where))
        deadline = time.monotonic() + timeout_s
        try:
            part.publish_end(failure=report)
            while not part.have_all_ended() and time.monotonic() < deadline:
                if self._learn_of_declaration():
                    break
                time.sleep(_POLL_S)
            # Compare even if all have ended: a broadcast, for example, can end on one rank alone.
            if part.is_behind():
                self._leave_broken_group(self._declare(report))
        except dist.DistError as store_error:
            # Leave, because other ranks may wait for this one and can't learn of its failure.
            self._leave_broken_group(self._describe_lost_store(store_error))
        if self._group.broken is not None:
            error.add_note(self._group.broken)

    def _watch_part(self, part: CheckpointPart, has_ended: threading.Event) -> None:
        """Break the group if this rank waits in a collective that a failed rank did not start.

        Runs on a thread during the call.
        """
        while not has_ended.wait(WATCH_INTERVAL_S) and self._group.broken is None:
            try:
                failure = part.find_awaited_failure() if part.has_failed() else None
                if failure is not None:
                    self._leave_broken_group(self._declare(failure))
            except dist.DistError as error:
                # No rank waits: one that fails without the store closes its connections.
                _LOG.warning("%s", self._describe_lost_store(error))
                return

    def handle(self, error: BaseException, *, where: str, begin: int | None = None) -> None:
        """Report an error, and leave the group if the error breaks it.

        Raises RankFailedError if another rank's failure caused the error. Otherwise, an error that
        breaks the group gets a note that says so.

        Args:
            error: The exception of this rank.
            where: Call and position, for messages.
            begin: Result of `take_event_number` when the call began; None is now.
        """
        if not self._in_background:  # the batch that is open may be the main thread's
            end_interrupted_batches()
        reported_at = getattr(error, _REPORTED_AT, 0)
        # Compare with the start of the call, because a later call, for example of a cached loader,
        # can raise the same exception again.
        is_reported = reported_at > (take_event_number() if begin is None else begin)
        if isinstance(error, RankFailedError) or is_reported:
            return
        was_broken = self._group.broken is not None
        try:
            failure = self._read_declaration()
            if failure is None:
                failure = self._agree(self._make_report(error, where=where))
                setattr(error, _REPORTED_AT, take_event_number())
        except dist.DistError as store_error:
            # The process that serves the store has ended. Without a store, ranks can't exchange
            # reports, so each rank leaves the group.
            failure = self._describe_lost_store(store_error)
        except BaseException:
            self._leave_broken_group(f"rank {self._rank} was interrupted in {where}")
            raise
        if failure is None:
            return
        self._leave_broken_group(failure)
        # An aborted collective ends without a result. Any later error may come from the missing
        # result, for example the shape of the next message.
        is_own = failure.startswith(f"rank {self._rank} ")
        is_consequence = (
            was_broken or not is_own
            if has_lost_connection(error)
            else was_broken and not is_own and isinstance(error, Exception)
        )
        if is_consequence:
            raise RankFailedError(self._group.broken) from error
        error.add_note(str(self._group.broken))

    def _describe_lost_store(self, error: dist.DistError) -> str:
        return f"rank {self._rank} lost the connection to the store: {error}"

    def _make_report(self, error: BaseException, *, where: str) -> FailureReport:
        return FailureReport(
            rank=self._rank,
            # Leave out the last number, which counts calls inside this one.
            call_numbers=self._num_calls[:-1] or self._num_calls[:],
            where=where,
            message=f"{type(error).__name__}: {error}"[:MAX_MESSAGE],
            num_collectives=count_collectives(in_background=self._in_background),
            may_have_messages=self._may_have_messages,
            has_lost_connection=has_lost_connection(error),
        )

    def _agree(self, report: FailureReport) -> str | None:
        """Publish a report; return None if the group survives, else the declared failure."""
        prefix = f"{self._prefix}/{self._num_survived}"
        self._store.set(f"{prefix}/report/{self._rank}", json.dumps(asdict(report)))
        keys = [f"{prefix}/report/{rank}" for rank in range(self._world_size)]
        # A lost connection always breaks the group, so there is no need to wait for all ranks. Wait
        # briefly for the cause: a rank that fails in init_model leaves its group before it reports.
        wait_s = min(AGREEMENT_S, _CAUSE_WAIT_S) if report.has_lost_connection else AGREEMENT_S
        deadline = time.monotonic() + wait_s
        while not (is_complete := self._store.check(keys)) and time.monotonic() < deadline:
            if (failure := self._read_declaration()) is not None:
                return failure
            time.sleep(_POLL_S)
        reports = [
            FailureReport(**json.loads(self._store.get(key)))
            for key in keys
            if self._store.check([key])
        ]
        # A rank that lost its connection to a failed one is not the cause.
        cause = next((each for each in reports if not each.has_lost_connection), report)
        # The first rank to decide sets the verdict for all ranks.
        verdict = bytes(
            self._store.compare_set(
                f"{prefix}/verdict",
                "",
                _SURVIVES if is_complete and self._survives(reports) else str(cause),
            )
        ).decode()
        if verdict == _SURVIVES:
            self._num_survived += 1
            return None
        return self._declare(verdict)

    def _survives(self, reports: list[FailureReport]) -> bool:
        if any(report.may_have_messages or report.has_lost_connection for report in reports):
            return False
        counts: defaultdict[str, set[int]] = defaultdict(set)
        for report in reports:
            for name, count in report.num_collectives.items():
                counts[name].add(count)
        return len({tuple(report.call_numbers) for report in reports}) == 1 and all(
            # Only a group's own ranks report its count.
            len(group_counts) == 1
            for group_counts in counts.values()
        )

    def _read_declaration(self) -> str | None:
        if not self._store.check([self._group.declaration_key]):
            return None
        return bytes(self._store.get(self._group.declaration_key)).decode()

    def _declare(self, failure: str) -> str:
        """Declare the group broken; return the failure that was declared first."""
        return bytes(self._store.compare_set(self._group.declaration_key, "", failure)).decode()

    def _leave_broken_group(self, failure: str) -> None:
        with self._group.breaking:  # the watching thread may arrive here at the same time
            if self._group.broken is not None:
                return
            advice = (
                "between the threads that save in the background are closed: save without "
                "in_background, or build a new engine on every rank."
                if self._in_background
                else "between the ranks are closed, so this engine can't be used any more: close() "
                "it, destroy the default process group if the engine did not create it, and build "
                "a new engine on every rank."
            )
            self._group.broken = f"{failure.rstrip('.')}. The connections {advice}"
            engines = list(self._group.engines)
        if not self._in_background and has_device_groups():
            self._abort_together(failure)
        # Close connections of all engines: a rank that is ahead may wait in the next engine.
        close_connections(set[str]().union(*(engine._other_ends() for engine in engines)))

    def _abort_together(self, failure: str) -> None:
        """Abort this rank's collectives once every other rank is ready to abort its own.

        The failed rank waits longer, until the others have aborted theirs. On one host, kernels of
        NCCL access the memory of other ranks, and an abort frees it
        (github.com/NVIDIA/nccl/issues/863). A kernel that is still waiting then ends with an
        illegal memory access, and its process cannot use the GPU any more.
        """
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        # As a rule, no kernel of the failed rank waits for another rank, so it aborts last.
        is_last = failure.startswith(f"rank {self._rank} ")
        self._publish_abort("began")
        self._wait_for_aborts(
            [self._abort_key("ended" if is_last else "began", rank) for rank in others]
        )
        abort_device_collectives()
        self._publish_abort("ended")

    def _abort_key(self, event: Literal["began", "ended"], rank: int) -> str:
        return f"{self._group.declaration_key}/abort {event}/{rank}"

    def _publish_abort(self, event: Literal["began", "ended"]) -> None:
        with suppress(dist.DistError):  # the others abort without this rank after ABORT_WAIT_S
            self._store.set(self._abort_key(event, self._rank), "")

    def _wait_for_aborts(self, keys: list[str]) -> None:
        deadline = time.monotonic() + ABORT_WAIT_S
        with suppress(dist.DistError):  # without the store, the ranks cannot wait for each other
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _other_ends(self) -> set[str]:
        """Return the remote ends of this engine's connections."""
        other_ends = self._published_connections()
        # Read it once: `init_model` may end while another engine's watching thread is in here.
        before = self._before_start
        if before is None:
            return other_ends
        return other_ends | find_new_connections(
            before, hosts={each.partition(" ")[0].rpartition(":")[0] for each in other_ends}
        )

    def _published_connections(self) -> set[str]:
        """Return the connections that other ranks had when the engine was built."""
        other_ends: set[str] = set()
        for rank in range(self._world_size):
            key = f"{self._prefix}/connections/{rank}"
            try:
                if rank != self._rank and self._store.check([key]):
                    other_ends.update(json.loads(self._store.get(key)))
            except dist.DistError:
                # Without the store, this rank can't find connections of other ranks. They have lost
                # the store, too, and end by their own timeout.
                return other_ends
        return other_ends

    def _learn_of_declaration(self) -> bool:
        """Leave the group if another rank declared it broken; return True if so."""
        failure = self._read_declaration()
        if failure is not None:
            self._leave_broken_group(failure)
        return failure is not None

    def _learn_or_lose_store(self) -> bool:
        """Leave the group if it is declared broken or the store is lost; return True if so."""
        try:
            return self._learn_of_declaration()
        except dist.DistError as error:
            self._leave_broken_group(self._describe_lost_store(error))
            return True


def take_event_number() -> int:
    """Return a number that is higher than those of all earlier events in this process."""
    return next(_EVENTS)


def _watch(reference: "weakref.ref[RankFailures]") -> None:
    """Abort collectives on the device once another rank has declared the group broken."""
    while dist.is_initialized():
        time.sleep(WATCH_INTERVAL_S)
        failures = reference()
        if failures is None or not dist.is_initialized() or failures._learn_or_lose_store():
            return
        # Keep no reference during the sleep, so that a closed engine can be freed.
        del failures
