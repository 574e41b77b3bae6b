"""A server that misbehaves as its spec's environment says.

``silent`` answers nothing, ``garbled`` what can't be read; ``gives-up`` hangs up before it has started and ``hangs-up`` after that, and
only then each says why.
"""

import sys
import time
from multiprocessing.connection import Client

from temper_trainer.rollout.vllm.messages import Ready, ServerSpec

if __name__ == "__main__":
    connection = Client(sys.argv[1], family="AF_UNIX")
    spec = connection.recv()
    assert isinstance(spec, ServerSpec)
    behaviour = spec.environment["BEHAVIOUR"]
    if behaviour != "gives-up":
        connection.send(Ready(vllm_version="none", device="cpu"))
        connection.recv()
    if behaviour in ("gives-up", "hangs-up"):
        connection.close()
        time.sleep(0.5)
        sys.exit("the key is 7")
    if behaviour == "garbled":
        connection.send_bytes(b"no pickle")
    time.sleep(600)
