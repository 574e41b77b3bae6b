"""Placement: which process shares which bundle."""

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config.run import RuntimeConfig
from temper_trainer.config_loading import load
from temper_trainer.runtime.placement import (
    Placement,
    RoleRequest,
    collect_role_requests,
    plan_bundles,
    plan_placement,
)


def test_roles_of_one_pool_use_the_same_bundle_per_rank() -> None:
    roles = {
        "actor": RoleRequest(num_workers=2, pool="train"),
        "critic": RoleRequest(num_workers=1, pool="train"),
    }
    placement = plan_placement(
        roles, RuntimeConfig(kind="ray", cpus_per_worker=2.0), cpus=4, gpus=0
    )
    assert [bundle.roles for bundle in placement.bundles] == [("actor", "critic"), ("actor",)]
    # 2 CPUs of the bundle between two roles, or for one.
    assert [bundle.worker_resources for bundle in placement.bundles] == [(1.0, 0.0), (2.0, 0.0)]
    assert placement.find_bundle("critic", 0) == 0


def test_moving_average_is_in_the_bundles_of_the_actor() -> None:
    config = load(
        [
            "experiment=quickstart",
            "algorithm=distill",
            "algorithm.group_size=1",
            "distillation.self_teacher=ema",
            "runtime.kind=ray",
            "actor.num_workers=2",
            "actor.pool=train",
            "rollout.pool=sample",
        ]
    ).config
    requests = collect_role_requests(config)
    assert requests["averaged_actor"] == RoleRequest(num_workers=2, pool="train")
    bundles = plan_bundles(requests, config.runtime)
    assert [b.roles for b in bundles if b.pool == "train"] == [("actor", "averaged_actor")] * 2


def test_different_pools_get_different_bundles() -> None:
    roles = {
        "actor": RoleRequest(num_workers=1, pool="train"),
        "rollout": RoleRequest(num_workers=1, pool="sample"),
    }
    placement = plan_placement(
        roles, RuntimeConfig(kind="ray", gpus_per_worker=1.0), cpus=2, gpus=2
    )
    assert [(bundle.pool, bundle.gpus) for bundle in placement.bundles] == [
        ("train", 1.0),
        ("sample", 1.0),
    ]
    assert "sample[0]: rollout on 1 CPU, 1 GPU" in placement.describe()


def test_cluster_that_is_too_small_is_refused_with_what_is_missing() -> None:
    roles = {"actor": RoleRequest(num_workers=3, pool="train")}
    with pytest.raises(
        ConfigError,
        match=r"actor: 3 in pool 'train'\) need 3 CPU and 0 GPU, but the cluster has 2 and 0",
    ):
        plan_placement(roles, RuntimeConfig(kind="ray"), cpus=2, gpus=0)


def make_shared_placement(*, num_ranks: int, num_servers: int, per_server: int) -> Placement:
    roles = {
        "actor": RoleRequest(num_workers=num_ranks, pool="train"),
        "critic": RoleRequest(num_workers=num_ranks, pool="train"),
        "rollout": RoleRequest(
            num_workers=num_servers, pool="train", devices_per_worker=per_server
        ),
    }
    runtime = RuntimeConfig(kind="ray", gpus_per_worker=1.0)
    return plan_placement(roles, runtime, cpus=16, gpus=8)


@pytest.mark.parametrize("gpus", [0.5, 2.0])
def test_servers_on_several_workers_gpus_need_one_gpu_of_each(gpus: float) -> None:
    roles = {
        "actor": RoleRequest(num_workers=2, pool="train"),
        "rollout": RoleRequest(num_workers=1, pool="train", devices_per_worker=2),
    }
    runtime = RuntimeConfig(kind="ray", gpus_per_worker=gpus)
    with pytest.raises(ConfigError, match="each server of rollout uses one GPU of each of several"):
        plan_placement(roles, runtime, cpus=16, gpus=8)


def test_servers_with_several_gpus_are_in_the_bundles_of_the_actor() -> None:
    placement = make_shared_placement(num_ranks=4, num_servers=2, per_server=2)
    assert [(each.gpus, each.roles) for each in placement.bundles] == [
        (1.0, ("actor", "critic", "rollout"))
    ] * 4
    assert placement.group_bundles("rollout", ["a"] * 4) == [(0, 1), (2, 3)]
    assert placement.group_bundles("actor", ["a"] * 4) == [(0,), (1,), (2,), (3,)]
    assert "rollout: every server on 2 of these, which are on one host" in placement.describe()


def test_servers_may_need_fewer_or_more_gpus_than_the_actor_has() -> None:
    fewer = make_shared_placement(num_ranks=4, num_servers=1, per_server=2)
    assert [len(each.roles) for each in fewer.bundles] == [3, 3, 2, 2]
    more = make_shared_placement(num_ranks=2, num_servers=1, per_server=4)
    assert [len(each.roles) for each in more.bundles] == [3, 3, 1, 1]


def test_server_is_never_divided_over_hosts() -> None:
    placement = make_shared_placement(num_ranks=4, num_servers=2, per_server=2)
    # Ray may order the bundles of two hosts in any way.
    assert placement.group_bundles("rollout", ["a", "b", "b", "a"]) == [(0, 3), (1, 2)]
    with pytest.raises(ConfigError, match="host a got 3 devices of rollout, which servers of 2"):
        placement.group_bundles("rollout", ["a", "a", "a", "b"])
