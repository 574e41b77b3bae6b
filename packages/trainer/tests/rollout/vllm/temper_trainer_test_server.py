"""A server that starts and then misbehaves as its spec's environment says: ``silent`` answers nothing, ``garbled`` what can't be read."""

import sys
import time
from multiprocessing.connection import Client

from temper_trainer.rollout.vllm.messages import Ready, ServerSpec

if __name__ == "__main__":
    connection = Client(sys.argv[1], family="AF_UNIX")
    spec = connection.recv()
    assert isinstance(spec, ServerSpec)
    connection.send(Ready(vllm_version="none", device="cpu"))
    connection.recv()
    if spec.environment["BEHAVIOUR"] == "garbled":
        connection.send_bytes(b"no pickle")
    time.sleep(600)
