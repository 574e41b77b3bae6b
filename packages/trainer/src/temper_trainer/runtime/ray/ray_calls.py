"""Wait for the results of calls to Ray actors, and turn Ray's errors into the trainer's."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import ray

from temper_trainer.progress import track_wait
from temper_trainer.runtime.worker_group import FullStoreError, WorkerError

DEATH_NOTICE_TIMEOUT_S = 5.0
"""Time after a rank's failure for Ray to report the death of another rank."""
_OBJECT_STORE_FULL_ERRORS = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError)


class RemoteMethod(Protocol):
    """A method of a Ray actor, as its handle offers it."""

    def remote(self, *arguments: object) -> "ray.ObjectRef[object]":
        """Call the method; the result is fetched later."""
        ...


def wait_for_all(
    refs: "Sequence[ray.ObjectRef[object]]", *, timeout_s: float, call: str
) -> list[object]:
    """Return results in order; raise as soon as one call fails.

    Other ranks may then still wait in a collective that the failed rank never reaches.

    Args:
        refs: One result per rank.
        timeout_s: Longest wait.
        call: Role and method, for messages.
    """
    pending, deadline = list(refs), time.monotonic() + timeout_s

    def list_pending_ranks() -> list[int]:
        return [rank for rank, ref in enumerate(refs) if ref in pending]

    def describe_pending() -> str:
        return f"; ranks {list_pending_ranks()} have not answered"

    # Take one result at a time, to notice a failed rank while other ranks still wait for it.
    with track_wait(call, describe_pending=describe_pending):
        while pending:
            ready, rest = ray.wait(
                pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise WorkerError(
                    f"{call}: ranks {list_pending_ranks()} did not answer within "
                    f"runtime.worker_timeout_s = {timeout_s} s."
                )
            pending = rest
            failure = _find_failure(ready[0], rank=refs.index(ready[0]), call=call)
            if failure is not None:
                raise _find_death(refs, pending, call=call) or failure
    return list(ray.get(list(refs)))


@contextmanager
def report_full_store(call: str) -> Iterator[None]:
    """Raise FullStoreError if arguments of a call in the body do not fit into the object store."""
    try:
        yield
    except _OBJECT_STORE_FULL_ERRORS as error:
        raise _make_full_store_error(call, error) from error


def _find_death(
    refs: "Sequence[ray.ObjectRef[object]]", pending: "list[ray.ObjectRef[object]]", *, call: str
) -> WorkerError | None:
    """Return the error of a dead rank, if there is one.

    A rank whose peer died in a collective fails before Ray has noticed the death. The death is the
    cause, so it is the error to report.
    """
    deadline = time.monotonic() + DEATH_NOTICE_TIMEOUT_S
    while pending:
        ready, pending = ray.wait(
            pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            return None
        failure = _find_failure(ready[0], rank=refs.index(ready[0]), call=call)
        if isinstance(failure, WorkerError):
            return failure
    return None


def _find_failure(ref: "ray.ObjectRef[object]", *, rank: int, call: str) -> Exception | None:
    """Return the error that a finished call raised, or None. A dead worker is a WorkerError."""
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else None
        if isinstance(cause, _OBJECT_STORE_FULL_ERRORS):
            return _make_full_store_error(f"{call}, result of rank {rank}", cause)
        if cause is not None:
            cause.__cause__ = error  # Ray's error has the traceback of the worker
        return cause or error
    except ray.exceptions.RayActorError as error:
        died = WorkerError(f"{call}: the worker of rank {rank} died ({_first_line(error)}).")
        died.__cause__ = error
        return died
    except _OBJECT_STORE_FULL_ERRORS as error:
        return _make_full_store_error(f"{call}, result of rank {rank}", error)
    except ray.exceptions.RayError as error:
        lost = WorkerError(f"{call}: the result of rank {rank} was lost ({_first_line(error)}).")
        lost.__cause__ = error
        return lost
    return None


def _make_full_store_error(call: str, error: BaseException) -> FullStoreError:
    return FullStoreError(
        f"{call}: Ray's object store is full, and so is the disk that it spills to "
        f"({_first_line(error)}). Give it more room (object_store_memory of ray start, or free the "
        "disk of its temporary folder), or send less at once: lower weight_sync.bucket_bytes or "
        "batching.prompts_per_step."
    )


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
