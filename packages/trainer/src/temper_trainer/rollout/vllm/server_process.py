"""The trainer's end of a server process: start, call, watch and end it. Does not import vLLM."""

import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
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
from temper_trainer.rollout.replica import ReplicaError
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
from temper_trainer.rollout.vllm.vllm_versions import describe_versions
from temper_trainer.rollout.weight_delta import StaleBaseError
from temper_trainer.temporary_folders import make_temporary_folder
from temper_trainer.types import Completion, SamplingRequest

logger = logging.getLogger(__name__)

SERVER_MODULE = "temper_trainer.rollout.vllm.server"
LOG_TAIL_LINES = 30
EXIT_GRACE_S = 5.0
"""How long a server that hung up may take to end: it often writes last what went wrong, and its socket is closed before that."""
_ERROR_CLASSES: dict[str, type[TemperError]] = {
    "ConfigError": ConfigError,
    "WeightError": WeightError,
    "StaleBaseError": StaleBaseError,
}
"""Errors of the server that keep their type; every other kind is a ReplicaError."""


class ServerProcess:
    """A Replica in a process of its own, started with another interpreter where one is given."""

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
        self._directory: Path | None = None
        self._connection: Connection[object, object] | None = None
        self._open: dict[int, Future[object]] = {}
        self._reader: threading.Thread | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._last_sign = time.monotonic()
        self._last_heartbeat = time.monotonic()
        self.versions: Mapping[str, str] = {}
        """Of vllm, torch and transformers in the server's environment, once it was started."""
        self.process_id: int | None = None
        """Of the server, while it runs."""

    @property
    def name(self) -> str:
        """For sentences."""
        return self._name

    def start(self) -> None:
        """Begin, and wait until the model is built.

        Raises:
            ConfigError: Its environment cannot run vLLM, or has one that is too old.
            ReplicaError: The process ended or took too long; with the end of its log.
        """
        self.close()
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        deadline = begin + self._start_timeout_s
        # The server may be killed at any time, so its files are in a folder that is removed here.
        self._directory = make_temporary_folder("server")
        spec = replace(self._spec, directory=str(self._directory))
        # A socket pair instead of a listener: only the child that inherits the other end can talk.
        self._connection, other_end = multiprocessing.Pipe()
        with other_end, self._log_file.open("ab") as log:
            try:
                # A group of its own: its workers end with it, and Ctrl-C in the terminal reaches the trainer alone.
                self._process = subprocess.Popen(
                    [self._python, "-m", SERVER_MODULE, str(other_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(other_end.fileno(),),
                    env=_make_environment(self._directory),
                )
            except OSError as error:
                self.close()
                raise ConfigError(
                    f"runtime.rollout_python is {self._python}, which can't be run: {error.strerror}."
                ) from error
        self.process_id = self._process.pid
        hello = self._receive(deadline=deadline, ended="did not start")
        assert isinstance(hello, Hello)
        if hello.problem is not None:
            self.close()
            raise ConfigError(f"{self._name} cannot start: {hello.problem}")
        self.versions = hello.versions
        # Sent only now, because a spec larger than the socket's buffer waits until someone reads it.
        with contextlib.suppress(OSError):  # the server has ended, which the next line reports
            self._connection.send_bytes(encode(spec))
        ready = self._receive(deadline=deadline, ended="ended while it built its model")
        assert isinstance(ready, Ready)
        logger.info("%s: %s, on %s", self._name, describe_versions(hello.versions), ready.device)
        logger.info(
            "%s is ready after %.0f s; its log is %s",
            self._name,
            time.monotonic() - begin,
            self._log_file,
        )
        self._last_sign = time.monotonic()
        self._open = {}
        self._reader = threading.Thread(
            target=self._read, args=(self._connection, self._open), daemon=True, name=self._name
        )
        self._reader.start()

    def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
        """Completions in the order of the requests."""
        return cast("Future[list[Completion]]", self.call("sample", list(requests)))

    def call(self, method: str, *arguments: object) -> "Future[object]":
        """Ask the server; the future fails with ReplicaError as soon as the server dies or stalls."""
        future: Future[object] = Future()
        encoded = encode_value(arguments)
        with self._lock:
            if self._connection is None:
                future.set_exception(self._dead("is not running"))
                return future
            number = next(self._numbers)
            if not self._open:
                self._last_sign = time.monotonic()
            self._open[number] = future
            ask = Call(number=number, method=method, arguments=encoded)
            try:
                self._connection.send_bytes(encode(ask))
            except OSError:
                self._open.pop(number, None)
                future.set_exception(self._dead("died"))
        return future

    def close(self) -> None:
        """End the server and everything it started."""
        with self._lock:
            connection, self._connection = self._connection, None
            process, self._process = self._process, None
            directory, self._directory = self._directory, None
            reader, self._reader = self._reader, None
            self.process_id = None
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("%s has ended by itself", self._name)
            process.wait()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        if connection is not None and reader is None:
            connection.close()  # otherwise its reader does, which sees the end of the process

    def _receive(self, *, deadline: float, ended: str) -> Message:
        """Return the next message of a server that starts; `ended` says what an end of it means."""
        assert self._connection is not None
        try:
            while not self._connection.poll(0.2):
                self._check_starting(deadline)
            return decode(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self._hear_out()
            code = None if self._process is None else self._process.poll()
            raise self._failed(f"{ended} (exit status {code})") from error
        except MessageError as error:
            raise self._failed(f"sent what can't be read ({error})") from error

    def _check_starting(self, deadline: float) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise self._failed(f"did not start (exit status {code})")
        if time.monotonic() > deadline:
            raise self._failed(
                f"was not ready within rollout.vllm.start_timeout_s = {self._start_timeout_s:g} s"
            )

    def _read(
        self, connection: "Connection[object, object]", waiting: "dict[int, Future[object]]"
    ) -> None:
        """Give answers to those who wait, until the server goes away or stalls."""
        reason = "died"
        try:
            while True:
                if waiting and (stall := self._stall()) is not None:
                    reason = stall
                    break
                if not connection.poll(1.0):
                    continue
                message = decode(connection.recv_bytes())
                if isinstance(message, Heartbeat):
                    self._last_heartbeat = time.monotonic()
                    continue
                self._last_sign = time.monotonic()
                if isinstance(message, CallResult):
                    _settle(waiting.pop(message.number, None), value=decode_result(message))
                elif isinstance(message, Progress):
                    advance_progress("completions", message.num_finished)
                elif isinstance(message, CallError):
                    kind = _ERROR_CLASSES.get(message.kind, ReplicaError)
                    _settle(
                        waiting.pop(message.number, None),
                        error=kind(f"{self._name}: {message.text}"),
                    )
        except (EOFError, OSError):
            logger.debug("%s: its connection is closed", self._name)
            self._hear_out()
        except Exception as unreadable:  # noqa: BLE001 - whatever it is: nobody may wait for the answer for ever
            reason = f"sent what can't be read ({type(unreadable).__name__}: {unreadable})"
        with self._lock:
            is_current = self._connection is connection
        if is_current:
            self.close()
        connection.close()
        error = self._dead(reason)
        while waiting:
            _settle(waiting.popitem()[1], error=error)

    def _stall(self) -> str | None:
        """Return how a server with open calls has stalled, or None."""
        now = time.monotonic()
        if now - max(self._last_sign, self._last_heartbeat) > self._stall_timeout_s:
            limit = f"rollout.vllm.stall_timeout_s = {self._stall_timeout_s:g} s"
            return f"gave no sign of life for {limit}"
        if now - self._last_sign > self._load_timeout_s:
            limit = f"rollout.vllm.load_timeout_s = {self._load_timeout_s:g} s"
            return f"is alive, but neither answered nor sampled a token for {limit}"
        return None

    def _hear_out(self) -> None:
        """Wait a little until a server that hung up has ended; one that was closed here is not waited for."""
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_GRACE_S)

    def _dead(self, what: str) -> ReplicaError:
        return ReplicaError(
            f"{self._name} {what}. The end of its log, {self._log_file}:\n{self._tail()}"
        )

    def _failed(self, what: str) -> ReplicaError:
        error = self._dead(what)
        self.close()
        return error

    def _tail(self) -> str:
        if not self._log_file.exists():
            return "    (empty)"
        with self._log_file.open("rb") as file:
            file.seek(max(0, self._log_file.stat().st_size - 32768))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:]) or "    (empty)"


def _make_environment(folder: Path) -> dict[str, str]:
    """Return a server's environment, in which its temporary files go to a folder that outlives no run.

    vLLM leaves a file `vllm_dist_*` in the temporary directory at every start.
    """
    # Sockets stay where they are, because their paths may have 107 characters.
    sockets = os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
    return os.environ | {"TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": sockets}


def _settle(
    future: "Future[object] | None", *, value: object = None, error: Exception | None = None
) -> None:
    """Finish a future that may have been given up."""
    if future is None:
        return
    try:
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
    except InvalidStateError:
        logger.debug("an answer came for a call that was given up")
