"""Test engines that follow each other in the same processes and share a rendezvous."""

import os
import socket
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from temper_engine_api.conformance.harness.rank import Rank
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.layout import default_layout
from temper_engine_fsdp.runtime.process_group import build_mesh, join, leave
from temper_engine_fsdp.sharding.sharded_parameter import FSDP2Parameter


def come_and_go(rank: Rank, *, port: int) -> None:
    """Join and leave process groups; the conformance kit's own group is destroyed first."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for turn in range(4):
        membership = join(device=torch.device("cpu"), timeout_s=20.0)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert float(total) == 2.0
        if rank.index == 0 and turn % 2 == 0:
            time.sleep(
                0.5
                # the other rank is already at the next turn and must not meet what this one left
                # behind
            )
        leave(membership)
    assert not dist.is_initialized()


def test_later_engine_does_not_read_keys_of_an_earlier_one(rank_pool: RankPool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank_pool.run(come_and_go, engine="fsdp", layout=default_layout(2), arguments={"port": port})


def test_shards_use_the_mesh_of_their_own_engine() -> None:
    # torch remembers what an operation on a DTensor gives, by meshes that are equal: a later
    # engine's parameters come out of it on the
    # earlier one's mesh, whose groups are gone ("Could not resolve the process group registered
    # under the name 4").
    for _ in range(2):
        membership = join(device=torch.device("cpu"), timeout_s=20.0)
        mesh, linear = build_mesh(membership, fsdp_size=None), nn.Linear(4, 3)
        full = linear.weight.detach().clone()
        fully_shard(linear, mesh=mesh)
        weight = FSDP2Parameter("weight", linear.weight, mesh=mesh, host_mesh=mesh)
        # Not on the host, as with CUDA.
        assert weight.to_row_dtensor(weight.local_shard().to("meta")).device_mesh is mesh
        assert torch.equal(weight.gather(weight.local_shard()), full)
        leave(membership)
