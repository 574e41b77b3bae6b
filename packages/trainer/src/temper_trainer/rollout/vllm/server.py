"""A server process: ``python -m temper_trainer.rollout.vllm.server SOCKET``. It ends when its client goes away."""

import importlib.util
import os
import queue
import sys
import threading
import time
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING

from temper_trainer.rollout.vllm.messages import Alive, Answer, Ask, Fault, ServerSpec
from temper_trainer.types import Completion, SamplingRequest

if TYPE_CHECKING:
    from temper_trainer.rollout.vllm.engine import Key, VllmEngine

_SIGN_OF_LIFE_S = 1.0


class Serving:
    """The loop between the socket and the engine: messages are read between two steps."""

    def __init__(self, engine: "VllmEngine", connection: "Connection[object, object]") -> None:
        self._engine = engine
        self._connection = connection
        self._inbox: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._calls: dict[int, list[Completion | None]] = {}
        self._last_sign = time.monotonic()
        self._num_untold = 0

    def run(self) -> None:
        """Until the client goes away."""
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            while self._engine.is_idle or not self._inbox.empty():
                ask = self._inbox.get()
                if ask is None:
                    return
                self._handle(ask)
            for key, completion in self._engine.step():
                self._finish(key, completion)
            if time.monotonic() - self._last_sign > _SIGN_OF_LIFE_S:
                self._send(Alive(num_finished=self._num_untold))
                self._num_untold = 0

    def _read(self) -> None:
        try:
            while True:
                ask = self._connection.recv()
                assert isinstance(ask, Ask)
                self._inbox.put(ask)
        except (EOFError, OSError):
            self._inbox.put(None)

    def _handle(self, ask: Ask) -> None:
        try:
            if ask.method == "sample":
                self._sample(ask)
            elif ask.method == "interrupt":
                for key, completion in self._engine.interrupt():
                    self._finish(key, completion)
                self._send(Answer(number=ask.number, value=None))
            else:
                self._send(Answer(number=ask.number, value=getattr(self._engine, ask.method)(*ask.arguments)))
        except Exception as error:  # noqa: BLE001 - the client decides whether a call that failed ends this process
            self._send(Fault(number=ask.number, kind=type(error).__name__, text=str(error)))

    def _sample(self, ask: Ask) -> None:
        (requests,) = ask.arguments
        assert isinstance(requests, list)
        self._calls[ask.number] = [None] * len(requests)
        for place, request in enumerate(requests):
            assert isinstance(request, SamplingRequest)
            self._engine.add((ask.number, place), request)
        if not requests:
            self._send(Answer(number=ask.number, value=self._calls.pop(ask.number)))

    def _finish(self, key: "Key", completion: Completion) -> None:
        number, place = key
        self._calls[number][place] = completion
        self._num_untold += 1
        if None not in self._calls[number]:
            self._send(Answer(number=number, value=self._calls.pop(number)))

    def _send(self, message: object) -> None:
        self._last_sign = time.monotonic()
        try:
            self._connection.send(message)
        except OSError:
            self._inbox.put(None)


def main(address: str) -> None:
    """Connect, build the engine, serve."""
    connection = Client(address, family="AF_UNIX")
    spec = connection.recv()
    assert isinstance(spec, ServerSpec)
    if importlib.util.find_spec("vllm") is None:
        sys.exit(
            f"{sys.executable} has no vLLM, which rollout=vllm needs: pip install 'temper-trainer[vllm]' there, or name the interpreter of "
            "an environment that has it in runtime.rollout_python."
        )
    os.environ.update(spec.environment)
    # vLLM reads its variables when it is imported.
    from temper_trainer.rollout.vllm.engine import VllmEngine

    engine = VllmEngine(spec)
    connection.send(engine.ready())
    Serving(engine, connection).run()


if __name__ == "__main__":
    main(sys.argv[1])
