"""A server process: ``python -m temper_trainer.rollout.vllm.server FD``. It ends when its client goes away.

FD is the file descriptor of the inherited end of a socket pair, whose other end the client holds.
"""

import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from temper_trainer.rollout.vllm.messages import (
    Call,
    CallError,
    CallResult,
    Heartbeat,
    Hello,
    Message,
    Progress,
    ServerSpec,
    decode,
    decode_arguments,
    encode,
    encode_value,
)
from temper_trainer.rollout.vllm.vllm_versions import (
    find_import_problem,
    find_installed_versions,
    find_version_problem,
)
from temper_trainer.types import Completion, SamplingRequest

if TYPE_CHECKING:
    from temper_trainer.rollout.vllm.server_methods import EngineMethods
    from temper_trainer.rollout.vllm.vllm_engine import RequestKey, VllmEngine

_PROGRESS_INTERVAL_S = 1.0
_HEARTBEAT_INTERVAL_S = 5.0


class ServerLoop:
    """The loop between the socket and the engine: messages are read between two steps."""

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
        self._sampling: dict[int, list[Completion | None]] = {}
        self._last_sign = time.monotonic()
        self._num_untold = 0
        self._send_lock = threading.Lock()

    def run(self) -> None:
        """Serve for ever; `read_messages` ends the process."""
        threading.Thread(target=self._beat, daemon=True).start()
        while True:
            while self._engine.is_idle or not self._inbox.empty():
                self._handle(self._inbox.get())
            for key, completion in self._engine.step():
                self._finish(key, completion)
            if time.monotonic() - self._last_sign > _PROGRESS_INTERVAL_S:
                self._send(Progress(num_finished=self._num_untold))
                self._num_untold = 0

    def _handle(self, ask: Call) -> None:
        try:
            arguments = decode_arguments(ask)
            if ask.method == "sample":
                self._sample(ask.number, *arguments)
            elif ask.method == "interrupt":
                for key, completion in self._engine.interrupt():
                    self._finish(key, completion)
                self._answer(ask.number, ask.method, None)
            else:
                self._answer(ask.number, ask.method, getattr(self._calls, ask.method)(*arguments))
        except Exception as error:  # noqa: BLE001 - the client decides whether a call that failed ends this process
            self._send(CallError(number=ask.number, kind=type(error).__name__, text=str(error)))

    def _sample(self, number: int, requests: list[SamplingRequest]) -> None:
        self._sampling[number] = [None] * len(requests)
        for place, request in enumerate(requests):
            self._engine.add((number, place), request)
        if not requests:
            self._answer(number, "sample", self._sampling.pop(number))

    def _finish(self, key: "RequestKey", completion: Completion) -> None:
        number, place = key
        self._sampling[number][place] = completion
        self._num_untold += 1
        if None not in self._sampling[number]:
            self._answer(number, "sample", self._sampling.pop(number))

    def _answer(self, number: int, method: str, value: object) -> None:
        self._send(CallResult(number=number, method=method, value=encode_value(value)))

    def _send(self, message: Message) -> None:
        self._last_sign = time.monotonic()
        self._write(message)

    def _beat(self) -> None:
        # Loading weights and long prompts keep the main thread busy for minutes without a message.
        while True:
            time.sleep(_HEARTBEAT_INTERVAL_S)
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
    """Put calls into the inbox, and end this process as soon as its client is gone.

    Runs in a thread of its own from the start, because building a model takes minutes and a step
    seconds, and servers without a client must not keep their GPUs for that long.
    """
    try:
        while True:
            ask = decode(connection.recv_bytes())
            assert isinstance(ask, Call)
            inbox.put(ask)
    except (EOFError, OSError):
        kill_process_group()


def kill_process_group() -> None:
    """End this process and, where it leads its group, as a server does, the workers in it."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def main(descriptor: int) -> None:
    """Build the engine and serve the client at the other end of the socket pair."""
    os.set_inheritable(descriptor, False)
    connection: Connection[object, object] = Connection(descriptor)
    versions = find_installed_versions()
    problem = find_version_problem(versions, python=sys.executable) or find_import_problem()
    connection.send_bytes(encode(Hello(versions=versions, problem=problem)))
    if problem is not None:
        sys.exit(problem)
    spec = decode(connection.recv_bytes())
    assert isinstance(spec, ServerSpec)
    inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=read_messages, args=(connection, inbox), daemon=True).start()
    os.environ.update(spec.environment)
    # vLLM reads its variables when it is imported.
    from temper_trainer.rollout.vllm.vllm_engine import VllmEngine

    engine = VllmEngine(spec)
    connection.send_bytes(encode(engine.ready()))
    ServerLoop(engine, connection, inbox).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
