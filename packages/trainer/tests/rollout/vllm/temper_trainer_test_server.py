"""A server that misbehaves as its spec's environment says.

`beats` sends only heartbeats; `builds` never becomes ready; `silent` sends nothing; `garbled` sends
bytes that cannot be decoded; `stuck` serves an engine whose first step never ends. `crashes` leaves
a worker, and writes its process id and the folder of vLLM's sockets into the file of the spec's
environment. `gives-up` closes its connection before it has started and `hangs-up` after that; both
log the reason only then.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from temper_trainer.rollout.vllm import server
from temper_trainer.rollout.vllm.messages import (
    Call,
    Heartbeat,
    Hello,
    Ready,
    ServerSpec,
    decode,
    encode,
)
from temper_trainer.rollout.vllm.server import ServerLoop, read_messages


class StuckEngine:
    """An engine with a request that it never samples a token for."""

    is_idle = False

    def step(self) -> None:
        """Sleep for longer than a test."""
        time.sleep(600)


if __name__ == "__main__":
    connection: "Connection[Any, Any]" = Connection(int(sys.argv[1]))
    connection.send_bytes(encode(Hello(versions={"vllm": "0.32.0"})))
    spec = decode(connection.recv_bytes())
    assert isinstance(spec, ServerSpec)
    behaviour = spec.environment["BEHAVIOUR"]
    if behaviour == "crashes":
        worker = subprocess.Popen(["sleep", "600"])
        folder = os.environ["VLLM_RPC_BASE_PATH"]
        Path(spec.environment["FILE"]).write_text(f"{worker.pid} {folder}")
        os._exit(1)
    if behaviour == "builds":
        inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
        threading.Thread(target=read_messages, args=(connection, inbox), daemon=True).start()
        time.sleep(600)
    if behaviour != "gives-up":
        connection.send_bytes(encode(Ready(device="cpu")))
        connection.recv_bytes()
    if behaviour in ("gives-up", "hangs-up"):
        connection.close()
        time.sleep(0.5)
        sys.exit("the key is 7")
    while behaviour == "beats":
        connection.send_bytes(encode(Heartbeat()))
        time.sleep(0.1)
    if behaviour == "stuck":
        server._HEARTBEAT_INTERVAL_S = 0.1
        engine: Any = StuckEngine()
        ServerLoop(engine, connection, queue.SimpleQueue()).run()
    if behaviour == "garbled":
        connection.send_bytes(b"no message")
    time.sleep(600)
