"""Start, call, watch and end a server process from the trainer. Does not import vLLM."""

import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from temper_engine_api.errors import ConfigError, TemperError, WeightError
from temper_trainer.progress import advance_progress
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.vllm.messages import (
    Call,
    CallError,
    CallResult,
    Heartbeat,
    Hello,
    Message,
    MessageError,
    Progress,
    Ready,
    ServerSpec,
    decode,
    decode_result,
    encode,
    encode_value,
)
from temper_trainer.rollout.vllm.server_folders import ServerFolders
from temper_trainer.rollout.vllm.server_group import kill_server_group
from temper_trainer.rollout.vllm.vllm_versions import (
    describe_versions,
    find_temper_problem,
    find_temper_version,
)
from temper_trainer.rollout.weight_delta import StaleBaseError
from temper_trainer.types import Completion, RefusedRequestError, SamplingRequest

logger = logging.getLogger(__name__)

SERVER_MODULE = "temper_trainer.rollout.vllm.server"
LOG_TAIL_LINES = 30
EXIT_GRACE_S = 5.0
"""Time for a server that closed its connection to exit. It often logs the cause after closing."""
_ERROR_CLASSES: dict[str, type[TemperError]] = {
    "ConfigError": ConfigError,
    "RefusedRequestError": RefusedRequestError,
    "WeightError": WeightError,
    "StaleBaseError": StaleBaseError,
}
"""Errors of a server that keep their class; any other becomes a ReplicaError."""


class ServerProcess:
    """A Replica in its own process, which may use another interpreter than the trainer."""

    def __init__(
        self,
        spec: ServerSpec,
        *,
        name: str,
        python: str,
        log_file: Path,
        start_timeout_s: float,
        stall_timeout_s: float,
        load_timeout_s: float = math.inf,
    ) -> None:
        self._spec = spec
        self._name = name
        self._python = python
        self._log_file = log_file
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._load_timeout_s = load_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._folders: ServerFolders | None = None
        self._connection: Connection[object, object] | None = None
        self._open_calls: dict[int, Future[object]] = {}
        self._reader: threading.Thread | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._last_progress = time.monotonic()
        self._last_heartbeat = time.monotonic()
        self.versions: Mapping[str, str] = {}
        """Versions of vllm, torch and transformers in the server's environment; see Replica."""
        self.process_id: int | None = None
        """Id of the process while it runs."""

    @property
    def name(self) -> str:
        """Name for messages; see Replica."""
        return self._name

    @property
    def can_restart(self) -> bool:
        """True: the process belongs to the trainer; see Replica."""
        return True

    def start(self) -> None:
        """Start the process and wait until its model is built.

        Raises:
            ConfigError: If its environment has no vLLM, or one that is too old.
            ReplicaError: If the process ended or took too long; with the end of its log.
        """
        self.close()
        begin = time.monotonic()
        deadline = begin + self._start_timeout_s
        self._connection = self._connect()
        # A server that listens makes its own.
        directory = "" if self._folders is None else str(self._folders.files)
        spec = replace(self._spec, directory=directory)
        hello = self._receive(deadline=deadline, ended="did not start")
        assert isinstance(hello, Hello)
        problem = hello.problem or find_temper_problem(hello.temper, run=find_temper_version())
        if problem is not None:
            self.close()
            raise ConfigError(f"{self._name} cannot start: {problem}")
        self.versions = hello.versions
        # Sent only after Hello: a spec above the socket's buffer blocks until the server reads it.
        with contextlib.suppress(OSError):  # the server has ended; the next line reports it
            self._connection.send_bytes(encode(spec))
        ready = self._receive(deadline=deadline, ended="ended while it built its model")
        assert isinstance(ready, Ready)
        logger.info("%s: %s, on %s", self._name, describe_versions(hello.versions), ready.device)
        self._log_start(time.monotonic() - begin)
        self._last_progress = time.monotonic()
        self._open_calls = {}
        self._reader = threading.Thread(
            target=self._read,
            args=(self._connection, self._open_calls),
            daemon=True,
            name=self._name,
        )
        self._reader.start()

    def _log_start(self, seconds: float) -> None:
        logger.info("%s is ready after %.0f s; its log is %s", self._name, seconds, self._log_file)

    def _connect(self) -> "Connection[object, object]":
        """Start the process, and return the trainer's end of its connection."""
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._folders = folders = ServerFolders.make()
        # Use a socket pair in place of a listening socket, so that only the child process can
        # connect.
        connection, other_end = multiprocessing.Pipe()
        with other_end:
            self._process = self._launch(other_end.fileno(), folders=folders)
        self.process_id = self._process.pid
        return connection

    def _launch(self, connection_fd: int, *, folders: ServerFolders) -> subprocess.Popen[bytes]:
        with self._log_file.open("ab") as log:
            try:
                # Start a new session. Then killing the process group also ends the workers, and
                # Ctrl-C in the terminal only reaches the trainer.
                return subprocess.Popen(
                    [self._python, "-m", SERVER_MODULE, str(connection_fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(connection_fd,),
                    env=folders.make_environment(),
                )
            except OSError as error:
                self.close()
                raise ConfigError(
                    f"runtime.rollout_python is {self._python}, which cannot be started: "
                    f"{error.strerror}."
                ) from error

    def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
        """Sample completions; see Replica."""
        number = next(self._numbers)
        future = cast("Future[list[Completion]]", self._call(number, "sample", list(requests)))

        def abort(future: "Future[list[Completion]]") -> None:
            if future.cancelled():
                self.call("interrupt", number)

        future.add_done_callback(abort)
        return future

    def call(self, method: str, *arguments: object) -> "Future[object]":
        """Call a server method.

        The future fails with ReplicaError as soon as the server dies or stalls.
        """
        return self._call(next(self._numbers), method, *arguments)

    def _call(self, number: int, method: str, *arguments: object) -> "Future[object]":
        """Send a call with a number that no other call has."""
        future: Future[object] = Future()
        encoded = encode_value(arguments)
        with self._lock:
            if self._connection is None:
                future.set_exception(self._make_error("is not running"))
                return future
            # An idle server makes no progress, and that time must not count against this call.
            if not self._open_calls:
                self._last_progress = time.monotonic()
            self._open_calls[number] = future
            call = Call(number=number, method=method, arguments=encoded)
            try:
                self._connection.send_bytes(encode(call))
            except OSError:
                self._open_calls.pop(number, None)
                future.set_exception(self._make_error("died"))
        return future

    def close(self) -> None:
        """End the server and its workers. Idempotent."""
        with self._lock:
            connection, self._connection = self._connection, None
            process, self._process = self._process, None
            folders, self._folders = self._folders, None
            reader, self._reader = self._reader, None
            self.process_id = None
        # SIGKILL and not SIGTERM: the server stores nothing, and a hanging one would ignore the
        # latter.
        if process is not None:
            try:
                kill_server_group(process.pid)
            except ProcessLookupError:
                logger.debug("%s has ended by itself", self._name)
            process.wait()
        if folders is not None:
            folders.remove()
        if connection is None:
            return
        if reader is None:
            connection.close()
        else:
            # The reader thread closes it, and notices this also if the server runs on.
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(connection.fileno())) as end,
            ):
                end.shutdown(socket.SHUT_RDWR)

    def _receive(self, *, deadline: float, ended: str) -> Message:
        """Return the next message of a starting server.

        Args:
            deadline: Time on the monotonic clock when the start has failed.
            ended: Problem to report if the process ends first.
        """
        assert self._connection is not None
        try:
            while not self._connection.poll(0.2):
                self._check_starting(deadline)
            return decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self._wait_for_exit()
            code = None if self._process is None else self._process.poll()
            raise self._close_with_error(f"{ended} (exit status {code})") from error
        except MessageError as error:
            raise self._close_with_error(f"sent an invalid message ({error})") from error

    def _check_starting(self, deadline: float) -> None:
        code = None if self._process is None else self._process.poll()
        if code is not None:
            raise self._close_with_error(f"did not start (exit status {code})")
        if time.monotonic() > deadline:
            raise self._close_with_error(
                f"was not ready within rollout.vllm.start_timeout_s = {self._start_timeout_s:g} s"
            )

    def _read(
        self, connection: "Connection[object, object]", open_calls: "dict[int, Future[object]]"
    ) -> None:
        """Read messages and complete open calls until the server ends or stalls.

        Runs in a thread.
        """
        reason = "died"
        try:
            while True:
                if open_calls and (stall := self._find_stall()) is not None:
                    reason = stall
                    break
                if not connection.poll(1.0):
                    continue
                message = decode(connection.recv_bytes())
                if isinstance(message, Heartbeat):
                    self._last_heartbeat = time.monotonic()
                    continue
                self._last_progress = time.monotonic()
                if isinstance(message, CallResult):
                    _settle(open_calls.pop(message.number, None), value=decode_result(message))
                elif isinstance(message, Progress):
                    advance_progress("completions", message.num_finished)
                elif isinstance(message, CallError):
                    kind = _ERROR_CLASSES.get(message.kind, ReplicaError)
                    _settle(
                        open_calls.pop(message.number, None),
                        error=kind(f"{self._name}: {message.text}"),
                    )
        except (EOFError, OSError):
            logger.debug("%s: its connection is closed", self._name)
            self._wait_for_exit()
        except Exception as unreadable:  # noqa: BLE001 - any error must complete the open calls, or their callers wait forever
            reason = f"sent an invalid message ({type(unreadable).__name__}: {unreadable})"
        # After `close`, a new server may have another connection, and must not be closed.
        with self._lock:
            is_current = self._connection is connection
        if is_current:
            self.close()
        connection.close()
        error = self._make_error(reason)
        while open_calls:
            _settle(open_calls.popitem()[1], error=error)

    def _find_stall(self) -> str | None:
        """Return why a server with open calls counts as stalled, or None."""
        now = time.monotonic()
        if now - max(self._last_progress, self._last_heartbeat) > self._stall_timeout_s:
            limit = f"rollout.vllm.stall_timeout_s = {self._stall_timeout_s:g} s"
            return f"sent no message for {limit}"
        if now - self._last_progress > self._load_timeout_s:
            limit = f"rollout.vllm.load_timeout_s = {self._load_timeout_s:g} s"
            return f"is alive, but has neither answered nor sampled a token for {limit}"
        return None

    def _wait_for_exit(self) -> None:
        """Wait up to EXIT_GRACE_S for the process to exit, unless `close` has ended it."""
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_GRACE_S)

    def _make_error(self, problem: str) -> ReplicaError:
        return ReplicaError(f"{self._name} {problem}. {self._describe_log()}")

    def _describe_log(self) -> str:
        return f"The end of its log, {self._log_file}:\n{self._read_log_tail()}"

    def _close_with_error(self, problem: str) -> ReplicaError:
        error = self._make_error(problem)
        self.close()
        return error

    def _read_log_tail(self) -> str:
        if not self._log_file.exists():
            return "    (empty)"
        with self._log_file.open("rb") as file:
            # Read only the end, because the log of a long run may be large.
            file.seek(max(0, self._log_file.stat().st_size - 32768))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:]) or "    (empty)"


def _settle(
    future: "Future[object] | None", *, value: object = None, error: Exception | None = None
) -> None:
    """Complete a future, if it exists and is not done."""
    if future is None:
        return
    try:
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
    # `close` and this thread may both complete a call; the first one wins.
    except InvalidStateError:
        logger.debug("a result arrived for a call that had already failed")
