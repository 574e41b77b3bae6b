r"""Run `temper-train`, and kill its first server while the third set of weights is sent to it.

    python -m tools.gpu.kill_while_sending SETTING...

The settings need servers that run in processes of this host, `weight_sync.transport=collective`,
no Ray, and weights that fill several buckets.
"""

import os
import signal
import sys

from torch import Tensor

import temper_trainer.__main__
from temper_trainer.rollout.weight_channel import WeightChannel
from temper_trainer.weight_sync.collective_transport import CollectiveTransport
from temper_trainer.weight_sync.transport import SentWeights
from tools.gpu.trainer_vllm import find_servers

SETS, BUCKETS = 3, 2
"""The server is killed after this many buckets of this set."""

send_once, send = CollectiveTransport._send_once, WeightChannel.send
num_sets, num_buckets = 0, 0


def count_set(transport: CollectiveTransport, version: int) -> SentWeights:
    """Send a set of weights."""
    global num_sets
    num_sets += 1
    return send_once(transport, version)


def send_and_kill(channel: WeightChannel, data: Tensor) -> None:
    """Send a bucket, and kill the server after the chosen one."""
    global num_buckets
    send(channel, data)
    num_buckets += num_sets == SETS
    if num_sets == SETS and num_buckets == BUCKETS:
        server = find_servers(os.getpid())[0]
        print(f"killed server {server} after {BUCKETS} buckets of set {SETS}", flush=True)
        os.killpg(server, signal.SIGKILL)


if __name__ == "__main__":
    CollectiveTransport._send_once = count_set  # type: ignore[method-assign, assignment]
    WeightChannel.send = send_and_kill  # type: ignore[method-assign, assignment]
    sys.exit(temper_trainer.__main__.main())
