"""Joining and leaving: engines that follow each other in the same processes, over the environment's rendezvous."""

import os
import socket
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from temper_engine_fsdp.process_group import join, leave


def _come_and_go(rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for turn in range(4):
        membership = join(device=torch.device("cpu"), timeout_s=20.0)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert float(total) == 2.0
        if rank == 0 and turn % 2 == 0:
            time.sleep(0.5)  # the other rank is already at the next turn and must not meet what this one left behind
        leave(membership)
    assert not dist.is_initialized()


def test_engines_that_follow_each_other_never_meet_what_the_earlier_one_left_behind() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_come_and_go, args=(port,), nprocs=2)
