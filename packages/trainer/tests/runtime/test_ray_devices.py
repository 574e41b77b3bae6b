"""A server with several GPUs in a real Ray cluster, whose GPUs are only numbers."""

from collections.abc import Iterator
from typing import Any

import pytest

from temper_trainer.config.run import RuntimeConfig
from temper_trainer.runtime.placement import RoleRequest

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    ray.init(
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_server_gets_the_gpus_of_the_actors_ranks() -> None:
    from temper_trainer.runtime.ray.device_holder import DeviceHolder
    from temper_trainer.runtime.ray.ray_runtime import RayRuntime

    roles = {
        "actor": RoleRequest(num_workers=2, pool="train"),
        "rollout": RoleRequest(num_workers=1, pool="train", devices_per_worker=2),
    }
    runtime = RayRuntime(
        RuntimeConfig(kind="ray", gpus_per_worker=1.0),
        roles=roles,
        engine_name="fsdp",
        num_threads=1,
        weight_path=(),
    )
    ranks: list[Any] = [runtime._start(DeviceHolder, bundle=bundle) for bundle in range(2)]
    gpus = [gpu for each in ray.get([rank.list_gpus.remote() for rank in ranks]) for gpu in each]
    assert sorted(gpus) == ["5", "7"]
    (bundles,) = runtime.placement.group_bundles("rollout", runtime._nodes())
    # Twice, because a server that is started again gets the same GPUs.
    assert [runtime._reserve_gpus(bundles) for _ in range(2)] == [",".join(gpus)] * 2
    ray.kill(runtime._holders[bundles[0]])
    assert runtime._reserve_gpus(bundles) == ",".join(gpus)
    assert ray.available_resources().get("GPU", 0) == 0
    runtime.close()
