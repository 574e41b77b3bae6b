"""Ranks gather the same information about all parameters."""

import torch.distributed as dist

from temper_engine_api.conformance.harness.rank import Rank
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.layout import default_layout
from temper_engine_megatron.weights.parameter_info import ParameterInfo, gather_parameter_infos


def describe(name: str, *, expert_rank: int | None) -> ParameterInfo:
    return ParameterInfo(
        name=name,
        stage=0,
        expert_rank=expert_rank,
        shape=(4, 2),
        split_dim=None,
        is_vocab_matrix=False,
        is_buffer=False,
        stacks_experts=False,
    )


def check_gathered_infos(rank: Rank) -> None:
    """Gather a shared and a different parameter from two ranks."""
    shared = describe("norm", expert_rank=None)
    experts = [describe(f"expert{index}", expert_rank=index) for index in range(2)]
    gathered = gather_parameter_infos([shared, experts[rank.index]], dist.group.WORLD)
    assert gathered == [shared, *experts]
    assert hash(gathered[1]) == hash(experts[0])
    assert gather_parameter_infos([], dist.group.WORLD) == []


def test_infos_of_two_ranks_arrive_in_rank_order_and_once(rank_pool: RankPool) -> None:
    rank_pool.run(check_gathered_infos, engine="megatron", layout=default_layout(2), arguments={})
