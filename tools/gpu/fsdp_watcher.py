"""Check the message of a rank on NCCL that waits because the other rank skips an update.

    python -m tools.gpu.fsdp_watcher [--device cpu]

Prints the log of the waiting rank. Exits with 0 if the message names the rank, the stage, the
micro-batch, the collective and the state of the other rank.
"""

import argparse
import logging
import os
import re
import subprocess
import sys
import time
from typing import Literal

from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from tools.gpu.workload import SMALL, ClippedPolicy, find_free_port, run_update, small_batch

TIMEOUT_S = 20.0
EXPECTED_MESSAGE = re.compile(
    r"rank 0 (may be about to time out in \w+ of [\d, \[\]]+ in group [^ ]+|timed out in \w+) "
    r"during a training call \(micro-batch \d+ of \d+\), \d+ s .*"
    r"Rank 1 is in between calls since \d+ s\."
)


def rank_main(device: Literal["cuda", "cpu"]) -> None:
    """Run two updates; rank 1 sleeps instead of running the second one."""
    logging.basicConfig(level=logging.INFO)
    precision = PrecisionSpec(compute="bf16" if device == "cuda" else "fp32")
    model, optimizer = ModelSpec(architecture=SMALL), OptimizerSpec(lr=1e-3)
    engine = FSDPEngine(
        FSDPConfig(
            model=model,
            optimizer=optimizer,
            precision=precision,
            device=device,
            collective_timeout_s=TIMEOUT_S,
        )
    )
    engine.init_model()
    engine.set_loss_fn(ClippedPolicy())
    packed = engine.shard_data(small_batch(), max_tokens=1024)
    for number in range(2):
        if number == 1 and os.environ["RANK"] == "1":
            time.sleep(600)
        run_update(engine, packed)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(options.device)
        return
    port = find_free_port()
    command = [sys.executable, "-m", "tools.gpu.fsdp_watcher", "--device", options.device]
    variables = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            command,
            env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        sys.exit(0 if _find_message(ranks[0]) else 1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _find_message(rank: subprocess.Popen[str]) -> bool:
    """Print the log of a rank until the message appears; return False if it never does."""
    assert rank.stderr is not None
    for line in rank.stderr:
        print(line, end="", flush=True)
        if match := EXPECTED_MESSAGE.search(line):
            print(f"\n{match.group()}", flush=True)
            return True
    print("the expected message did not appear", flush=True)
    return False


if __name__ == "__main__":
    main()
