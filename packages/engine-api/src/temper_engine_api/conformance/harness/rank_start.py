"""Start rank processes, forked from servers that have done the imports.

Importing torch and an engine takes longer than most tests. A server imports them once for all ranks
of a session, and for those that replace killed ranks. This is the first module that a server
imports, so at its top it imports neither torch nor an engine.
"""

import atexit
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle

NUM_SERVERS = 2
"""Number of servers in a session.

Different hash seeds give ranks another order of sets, as in production, so that a collective inside
a loop over a set fails.
"""
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    # cuBLAS is deterministic only with a fixed workspace, and reads the setting once.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Progress bars of transformers would stand between the failures.
    "TQDM_DISABLE": "1",
}
"""Environment variables of ranks, whatever those of the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForkRequest:
    """Fork a rank; its connection follows as a file descriptor."""

    index: int
    stack_file: str
    engine: str | None
    """Name of an engine that the server imports before it forks; None for no imports."""
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    path: list[str] = field(default_factory=lambda: list(sys.path))
    folder: str = field(default_factory=os.getcwd)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WaitRequest:
    """Wait for the end of a rank."""

    pid: int
    timeout_s: float


class RankProcess:
    """A rank, which is a child process of a server."""

    def __init__(self, pid: int, *, server: "_ForkServer") -> None:
        self.pid = pid
        self._server = server

    def wait(self, timeout_s: float = 60.0) -> int | None:
        """Return the exit code, or None if the rank still runs after the time."""
        return self._server.ask(_WaitRequest(pid=self.pid, timeout_s=timeout_s))

    def kill(self) -> None:
        # The server keeps the process ID of a rank that has ended until it is asked to wait.
        if self.wait(0.0) is None:
            os.kill(self.pid, signal.SIGKILL)


def start_rank(
    index: int, *, engine: str | None, stack_file: str
) -> tuple[RankProcess, Connection]:
    """Start a process that serves the jobs of a rank.

    Args:
        index: Rank of the process in every process group that it joins.
        engine: Name of the engine that the server imports first; None if what it loads would not
            work in a forked process.
        stack_file: File that SIGUSR1 writes the current stack to.

    Returns:
        The process and the connection for its jobs.
    """
    server = _find_server(index % NUM_SERVERS)
    local_end, remote_end = multiprocessing.Pipe()
    pid = server.ask(
        _ForkRequest(index=index, stack_file=stack_file, engine=engine), sent=remote_end
    )
    assert pid is not None
    # If this process kept a copy open, the death of the rank would not end the connection.
    remote_end.close()
    return RankProcess(pid, server=server), local_end


class _ForkServer:
    """A process that forks ranks."""

    def __init__(self, index: int) -> None:
        # Forked from this process, ranks would inherit the threads of the test session.
        context = multiprocessing.get_context("spawn")
        self._connection, remote_end = context.Pipe()
        # Python reads the hash seed when it starts.
        with _environment(**_VARIABLES, PYTHONHASHSEED=str(index + 1)):
            self._process = context.Process(
                target=_serve, args=(remote_end,), name=f"conformance-server-{index}"
            )
            self._process.start()
        remote_end.close()
        # Before multiprocessing waits for its children at exit.
        atexit.register(self._connection.close)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def ask(
        self, request: _ForkRequest | _WaitRequest, *, sent: Connection | None = None
    ) -> int | None:
        """Send a request, with a connection's file descriptor, and return the answer."""
        self._connection.send(request)
        if sent is not None:
            assert self._process.pid is not None
            send_handle(self._connection, sent.fileno(), self._process.pid)
        answer: int | None = self._connection.recv()
        return answer


_servers: dict[int, _ForkServer] = {}


def _find_server(index: int) -> _ForkServer:
    if index not in _servers or not _servers[index].is_alive:
        _servers[index] = _ForkServer(index)
    return _servers[index]


def _serve(connection: Connection) -> None:
    """Fork ranks until the session ends, which terminates those that still run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = multiprocessing.get_context("fork")
    ranks: dict[int, BaseProcess] = {}
    while True:
        try:
            request: _ForkRequest | _WaitRequest = connection.recv()
        except EOFError:
            return
        if isinstance(request, _WaitRequest):
            rank = ranks[request.pid]
            rank.join(request.timeout_s)
            connection.send(rank.exitcode)
            continue
        jobs = Connection(recv_handle(connection))
        if request.engine is not None:
            _import_first(request.engine)
        rank = context.Process(
            target=_run_rank,
            args=(request, connection, jobs),
            name=f"conformance-rank-{request.index}",
            daemon=True,
        )
        rank.start()
        jobs.close()
        assert rank.pid is not None
        ranks[rank.pid] = rank
        connection.send(rank.pid)


def _import_first(engine: str) -> None:
    """Import what a rank of the engine imports.

    An engine without an entry point may be a file that tests replace, so only transformers is
    imported for it.
    """
    # Do not look for garbage among imported objects, now and in the ranks.
    gc.disable()
    import transformers.modeling_utils  # noqa: F401

    from temper_engine_api.conformance.harness import engine_lookup, rank_process  # noqa: F401

    if ":" not in engine:
        # The rank imports it again, and reports the error.
        with suppress(Exception):
            engine_lookup.load_engine_class(engine)
    gc.freeze()
    gc.enable()


def _run_rank(request: _ForkRequest, server: Connection, jobs: Connection) -> None:
    """Serve jobs in the environment of the session."""
    server.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= request.environment | _VARIABLES
    sys.path[:] = request.path
    os.chdir(request.folder)
    gc.disable()
    from temper_engine_api.conformance.harness.rank_process import serve_jobs

    gc.freeze()
    gc.enable()
    serve_jobs(jobs, index=request.index, stack_file=request.stack_file)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables for processes that are started inside the context."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
