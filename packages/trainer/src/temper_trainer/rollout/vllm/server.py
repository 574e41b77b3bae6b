"""A server process: `python -m temper_trainer.rollout.vllm.server FD`.

It exits when its trainer does. FD is the file descriptor for one end of a socket pair. The process
inherits it; the trainer has the other end.
"""

import json
import os
import queue
import sys
import tempfile
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from temper_trainer.redaction import (
    print_redacted_traceback,
    redact_standard_streams,
    register_secrets,
)
from temper_trainer.rollout.vllm.messages import (
    Call,
    CallError,
    CallResult,
    Heartbeat,
    Hello,
    Message,
    PackedCompletion,
    Progress,
    ServerSpec,
    decode,
    decode_arguments,
    encode,
    encode_value,
)
from temper_trainer.rollout.vllm.server_group import claim_worker_memory, kill_server_group
from temper_trainer.rollout.vllm.vllm_versions import (
    find_import_problem,
    find_installed_versions,
    find_temper_version,
    find_version_problem,
)
from temper_trainer.types import Completion, SamplingRequest

if TYPE_CHECKING:
    from temper_trainer.rollout.vllm.server_methods import EngineMethods
    from temper_trainer.rollout.vllm.vllm_engine import RequestKey, VllmEngine

_PROGRESS_INTERVAL_S = 1.0
_HEARTBEAT_INTERVAL_S = 5.0
_SECRETS_VARIABLE = "TEMPER_SERVER_SECRETS"
"""Environment variable that passes the spec's secrets on to processes that vLLM starts."""


class ServerLoop:
    """Runs engine steps and handles calls between two steps."""

    def __init__(
        self,
        engine: "VllmEngine",
        connection: "Connection[object, object]",
        inbox: "queue.SimpleQueue[Call]",
    ) -> None:
        self._engine = engine
        self._calls: EngineMethods = engine
        self._connection = connection
        self._inbox = inbox
        self._sampling: dict[int, list[PackedCompletion | None]] = {}
        self._last_message = time.monotonic()
        self._num_unreported = 0
        self._is_in_step = False
        self._send_lock = threading.Lock()

    def run(self) -> None:
        """Serve forever; `read_messages` ends the process."""
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        while True:
            # Handle all waiting calls before the next step, so that an interrupt takes effect at
            # once. If the engine is idle, wait here for the next call.
            while self._engine.is_idle or not self._inbox.empty():
                self._handle(self._inbox.get())
            self._is_in_step = True
            finished = self._engine.step()
            self._is_in_step = False
            for key, completion in finished:
                self._finish(key, completion)
            if time.monotonic() - self._last_message > _PROGRESS_INTERVAL_S:
                self._send(Progress(num_finished=self._num_unreported))
                self._num_unreported = 0

    def _handle(self, call: Call) -> None:
        try:
            arguments = decode_arguments(call)
            if call.method == "sample":
                self._sample(call.number, *arguments)
            elif call.method == "interrupt":
                for key, completion in self._engine.interrupt(*arguments):
                    self._finish(key, completion)
                self._answer(call.number, call.method, None)
            else:
                self._answer(
                    call.number, call.method, getattr(self._calls, call.method)(*arguments)
                )
        except Exception as error:  # noqa: BLE001 - the trainer decides whether a failed call ends the server
            self._send(CallError(number=call.number, kind=type(error).__name__, text=str(error)))

    def _sample(self, number: int, requests: list[SamplingRequest]) -> None:
        self._sampling[number] = [None] * len(requests)
        try:
            for index, request in enumerate(requests):
                self._engine.add((number, index), request)
        except Exception:
            del self._sampling[number]
            # The engine has already accepted the requests before the refused one.
            self._engine.interrupt(number)
            raise
        if not requests:
            self._answer(number, "sample", self._sampling.pop(number))

    def _finish(self, key: "RequestKey", completion: Completion) -> None:
        number, index = key
        self._sampling[number][index] = PackedCompletion.pack(completion)
        self._num_unreported += 1
        if None not in self._sampling[number]:
            self._answer(number, "sample", self._sampling.pop(number))

    def _answer(self, number: int, method: str, value: object) -> None:
        self._send(CallResult(number=number, method=method, value=encode_value(value)))

    def _send(self, message: Message) -> None:
        self._last_message = time.monotonic()
        self._write(message)

    def _send_heartbeats(self) -> None:
        # Run in a thread, because the main thread may load weights or score a long prompt for
        # minutes. An engine step takes seconds. No heartbeat is sent during it, so that the trainer
        # notices a step that hangs. Between two steps, `run` itself sends messages.
        while True:
            time.sleep(_HEARTBEAT_INTERVAL_S)
            if not self._is_in_step:
                self._write(Heartbeat())

    def _write(self, message: Message) -> None:
        try:
            with self._send_lock:
                self._connection.send_bytes(encode(message))
        except OSError:
            kill_process_group()


def read_messages(
    connection: "Connection[object, object]", inbox: "queue.SimpleQueue[Call]"
) -> None:
    """Put calls into the inbox, and end this process as soon as the trainer is gone.

    This runs in its own thread from the start, because building a model takes minutes and a step
    takes seconds. A server without a trainer must not occupy its GPUs for that long.
    """
    try:
        while True:
            call = decode(connection.recv_bytes())
            assert isinstance(call, Call)
            inbox.put(call)
    except (EOFError, OSError):
        kill_process_group()


def kill_process_group() -> None:
    """Kill this process, and the workers in its process group if it is the group's leader."""
    try:
        if os.getpgrp() == os.getpid():
            kill_server_group(os.getpid())
    finally:
        os._exit(1)


def hide_secrets() -> None:
    """Redact secrets of the spec and the environment in all output of this process."""
    # Call this before importing vLLM, because its log handlers keep the streams that they find.
    redact_standard_streams()
    sys.excepthook = print_redacted_traceback
    register_secrets(json.loads(os.environ.get(_SECRETS_VARIABLE, "[]")))


def main(descriptor: int) -> None:
    """Build the engine and serve the trainer at the other end of the socket pair."""
    hide_secrets()
    # vLLM's workers must not inherit the socket. Otherwise it stays open when this process ends,
    # and the trainer does not notice.
    os.set_inheritable(descriptor, False)
    connection: Connection[object, object] = Connection(descriptor)
    versions = find_installed_versions()
    problem = find_version_problem(versions, python=sys.executable) or find_import_problem()
    hello = Hello(versions=versions, temper=find_temper_version(), problem=problem)
    connection.send_bytes(encode(hello))
    if problem is not None:
        sys.exit(problem)
    spec = decode(connection.recv_bytes())
    assert isinstance(spec, ServerSpec)
    register_secrets(spec.secrets)
    os.environ[_SECRETS_VARIABLE] = json.dumps(spec.secrets)
    inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=read_messages, args=(connection, inbox), daemon=True).start()
    if not spec.directory:
        # For a listening server, use the temporary directory that it made for this run.
        spec = replace(spec, directory=tempfile.gettempdir())
    os.environ.update(spec.environment)
    # Imported late: vLLM reads environment variables when it is imported.
    from temper_trainer.rollout.vllm.vllm_engine import VllmEngine

    with claim_worker_memory(Path(spec.directory)):
        engine = VllmEngine(spec)
    connection.send_bytes(encode(engine.ready()))
    ServerLoop(engine, connection, inbox).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
elif __name__ == "__mp_main__":
    # In processes that vLLM spawns, multiprocessing imports this module before anything else. Forks
    # need no call, because they inherit the server's streams.
    hide_secrets()
