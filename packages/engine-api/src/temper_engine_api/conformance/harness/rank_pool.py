"""A pool of rank processes, started once and shared by all layouts in a session.

A job is a module-level function that every rank runs with the same arguments. The error of a rank
that raises, dies or hangs names the rank. After a failure the process group is replaced; after a
death or a hang the processes are replaced too.
"""

import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Literal, NoReturn

from temper_engine_api.conformance.harness.rank import Job, P, T
from temper_engine_api.conformance.harness.rank_process import (
    JobReply,
    JobRequest,
    LeaveRequest,
)
from temper_engine_api.conformance.harness.rank_start import RankProcess, start_rank
from temper_engine_api.layout import Layout
from temper_engine_api.specs import Compute

JOB_TIMEOUT_S = 120.0
"""Time limit of a job on every rank; the first job also waits for the engine's imports."""
GRACE_PERIOD_S = 5.0
"""Time that the other ranks get to finish after one has raised."""

EXIT_TIMEOUT_S = 2.0
"""Time that a rank gets to leave its process group and exit."""


class RankFailureError(AssertionError):
    """A rank raised, died or hung; the message names rank and job.

    An AssertionError, because it is a failure of the test that ran the job.
    """


class RankPool:
    """A pool of rank processes."""

    def __init__(
        self,
        num_processes: int,
        *,
        folder: Path,
        device: Literal["cpu", "cuda"] = "cpu",
        compute: Compute = "fp32",
        job_timeout_s: float = JOB_TIMEOUT_S,
    ) -> None:
        self._num_processes = num_processes
        self._folder = folder
        self.device: Literal["cpu", "cuda"] = device
        self.compute: Compute = compute
        """Compute dtype of setups that do not set one."""
        self.job_timeout_s = job_timeout_s
        self._members: list[tuple[RankProcess, Connection]] = []
        self._num_groups = 0
        self._rendezvous: dict[str, str] = {}
        self._group_size = 0
        self.num_data_ranks = 1
        """Number of data-parallel ranks of the engine that ran the last job."""

    def run(
        self, job: Job[P, T], *, engine: str, layout: Layout, arguments: dict[str, object]
    ) -> list[T]:
        """Run a job on the first `layout.world_size` ranks.

        Args:
            job: Function that can be imported by module and name.
            engine: Entry point name or ``module:Class``.
            layout: Needs at most as many ranks as there are processes.
            arguments: Keyword arguments for the job; they are pickled.

        Returns:
            Return values from all ranks, in rank order.

        Raises:
            RankFailureError: A rank raised, died or hung.
        """
        __tracebackhide__ = True
        if not self._members:
            self._start(engine)
        name = f"{job.__module__}:{job.__qualname__}"
        if layout.name not in self._rendezvous:
            # This job needs another process group than the last one. NCCL destroys a group only
            # collectively, so all ranks leave the old group before any of them joins another.
            self._leave_last_group()
        request = JobRequest(
            engine=engine,
            layout=layout,
            rendezvous=self._make_rendezvous(layout),
            device=self.device,
            compute=self.compute,
            job=name,
            arguments=arguments,
        )
        self._group_size = layout.world_size
        replies = self._send_to(request, name, self._members[: layout.world_size])
        self.num_data_ranks = replies[0].num_data_ranks
        return [reply.value for reply in replies]  # type: ignore[misc]  # T, as the job returned it

    def replace_group(self) -> None:
        """Use a new process group for the next job, because a job has broken the current one."""
        self._rendezvous.clear()

    def close(self) -> None:
        """End every process."""
        for _, connection in self._members:
            # An idle rank sees the end of the connection, closes its engines and exits; others are
            # killed below.
            connection.close()
        for process, _ in self._members:
            if process.wait(EXIT_TIMEOUT_S) is None:
                process.kill()
                process.wait()
        self._members, self._rendezvous, self._group_size = [], {}, 0

    def _start(self, engine: str) -> None:
        # A forked process can use neither CUDA nor Apple's libraries if they were loaded before.
        is_imported_once = self.device == "cpu" and sys.platform != "darwin"
        for index in range(self._num_processes):
            self._members.append(
                start_rank(
                    index,
                    engine=engine if is_imported_once else None,
                    stack_file=str(self._stack_file(index)),
                )
            )

    def _send_to(
        self,
        request: JobRequest | LeaveRequest,
        name: str,
        members: Sequence[tuple[RankProcess, Connection]],
    ) -> list[JobReply]:
        __tracebackhide__ = True
        # Pickle before any send: an argument that cannot be pickled must not leave some ranks in a
        # job.
        message = pickle.dumps(request)
        for index, (process, connection) in enumerate(members):
            try:
                connection.send_bytes(message)
            except BrokenPipeError:
                exit_code = process.wait(EXIT_TIMEOUT_S)
                self._fail(f"rank {index} had exited with code {exit_code} before {name} started.")
        replies = self._collect(name, members)
        errors = [
            f"rank {i} raised in {name}:\n{r.error}"
            for i, r in enumerate(replies)
            if r.error is not None
        ]
        if errors:
            # After an error the ranks no longer agree on the next collective.
            self.replace_group()
            raise RankFailureError("\n".join(errors))
        return replies

    def _leave_last_group(self) -> None:
        """Make all ranks of the last process group leave it, also those not in the next one."""
        __tracebackhide__ = True
        members, self._group_size = self._members[: self._group_size], 0
        if members:
            self._send_to(LeaveRequest(), "leaving the process group", members)

    def _make_rendezvous(self, layout: Layout) -> str:
        """Return the rendezvous file of the layout's process group.

        There is one group at a time: a new layout leaves the former group and closes its engines.
        """
        if layout.name not in self._rendezvous:
            self._num_groups += 1
            # A new file for each group, since torch would find the keys of the former group in the
            # old one.
            self._rendezvous = {
                layout.name: str(self._folder / f"rendezvous-{os.getpid()}-{self._num_groups}")
            }
        return self._rendezvous[layout.name]

    def _collect(
        self, job: str, members: Sequence[tuple[RankProcess, Connection]]
    ) -> list[JobReply]:
        replies: dict[int, JobReply] = {}
        deadline = time.monotonic() + self.job_timeout_s
        while len(replies) < len(members):
            open_ends = {
                connection: i for i, (_, connection) in enumerate(members) if i not in replies
            }
            ready = wait(list(open_ends), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail_on_timeout(job, members, replies)
            for end in ready:
                index = next(i for connection, i in open_ends.items() if connection is end)
                reply = self._receive(job, index)
                replies[index] = reply
                if reply.error is not None:
                    # The others may wait in a collective for the failed rank.
                    deadline = min(deadline, time.monotonic() + GRACE_PERIOD_S)
        return [replies[i] for i in range(len(members))]

    def _receive(self, job: str, index: int) -> JobReply:
        process, connection = self._members[index]
        try:
            # Unpickling is safe: a process that this one started wrote the bytes.
            reply: JobReply = pickle.loads(connection.recv_bytes())  # noqa: S301
        except (EOFError, ConnectionResetError):
            # The connection may close before the process ends: wait, so that there is an exit code.
            exit_code = process.wait(EXIT_TIMEOUT_S)
            self._fail(f"rank {index} died in {job} with exit code {exit_code}.")
        return reply

    def _fail_on_timeout(
        self,
        job: str,
        members: Sequence[tuple[RankProcess, Connection]],
        replies: dict[int, JobReply],
    ) -> None:
        lines = [
            f"rank {i} raised in {job}:\n{r.error}"
            for i, r in replies.items()
            if r.error is not None
        ]
        for index in sorted(set(range(len(members))) - set(replies)):
            after = (
                "after another rank had raised" if lines else f"within {self.job_timeout_s:.0f} s"
            )
            lines.append(
                f"rank {index} did not answer {job} {after}. Its stack:\n{self._read_stack(index)}"
            )
        self._fail("\n".join(lines))

    def _read_stack(self, index: int) -> str:
        process = self._members[index][0]
        # The handler of faulthandler runs in C, so it works while the rank waits inside a
        # collective.
        os.kill(process.pid, signal.SIGUSR1)
        # Wait until the rank's signal handler has written its stack.
        time.sleep(0.3)
        return self._stack_file(index).read_text() or "(no stack available)"

    def _stack_file(self, index: int) -> Path:
        return self._folder / f"stack-of-rank-{index}"

    def _fail(self, message: str) -> NoReturn:
        # A rank that waits in a collective does not react to anything else.
        for process, _ in self._members:
            process.kill()
        self.close()
        raise RankFailureError(f"{message}\nThe rank processes are restarted for the next test.")
