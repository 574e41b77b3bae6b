"""Ranks gather the same information about all parameters."""

from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from temper_engine_megatron.weights.parameter_info import ParameterInfo, gather_parameter_infos


def describe(name: str, *, expert_rank: int | None) -> ParameterInfo:
    return ParameterInfo(
        name=name,
        stage=0,
        expert_rank=expert_rank,
        shape=(4, 2),
        split_dim=None,
        is_vocab_matrix=False,
        is_expert_adapter=False,
    )


def _gather_infos(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    shared = describe("norm", expert_rank=None)
    experts = [describe(f"expert{index}", expert_rank=index) for index in range(2)]
    gathered = gather_parameter_infos([shared, experts[rank]], dist.group.WORLD)
    assert gathered == [shared, *experts]
    assert hash(gathered[1]) == hash(experts[0])
    assert gather_parameter_infos([], dist.group.WORLD) == []
    dist.destroy_process_group()


def test_infos_of_two_ranks_arrive_in_rank_order_and_once(tmp_path: Path) -> None:
    spawn(_gather_infos, args=(str(tmp_path),), nprocs=2)
