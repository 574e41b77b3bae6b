"""A full object store of Ray gives an error that says what to do, for each way to send data."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.runtime.worker_group import FullStoreError, TrainingWorker, WorkerGroup

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
)
pytestmark = [pytest.mark.ray, pytest.mark.slow]

STORE_BYTES = 80 << 20
"""Bytes; Ray takes no less than 75 MiB."""
SENTENCE = r"actor: {name}.*Ray's object store is full.*object_store_memory of ray start"


def takes(worker: TrainingWorker, data: bytes) -> int:
    return len(data)


def gives(worker: TrainingWorker, num_bytes: int) -> bytes:
    return bytes(num_bytes)


@pytest.fixture(scope="module")
def group() -> Iterator[WorkerGroup]:
    from temper_trainer.runtime.ray.ray_worker_group import RayWorkerGroup, RoleActor

    ray.init(
        num_cpus=1,
        object_store_memory=STORE_BYTES,
        _system_config={"local_fs_capacity_threshold": 0.001},  # every disk counts as full
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={
            "env_vars": {
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
                )
            }
        },
    )
    config = FSDPConfig(model=ModelSpec(architecture={"model_type": "qwen2"}), device="cpu")
    actors = [ray.remote(RoleActor).options(num_cpus=1).remote()]
    made = RayWorkerGroup(
        "actor",
        actors=actors,
        engine_name="fsdp",
        config=config,
        num_threads=1,
        timeout_s=120.0,
        is_deprecated=False,
    )
    yield made
    made.close()
    ray.shutdown()


def test_arguments_that_do_not_fit_are_reported_and_the_worker_stays_usable(
    group: WorkerGroup,
) -> None:
    with pytest.raises(FullStoreError, match=SENTENCE.format(name="takes")):
        group.run(takes, [(bytes(2 * STORE_BYTES),)])
    assert group.run(takes, [(b"123",)]) == [3]


def test_result_that_does_not_fit_is_reported(group: WorkerGroup) -> None:
    with pytest.raises(FullStoreError, match=SENTENCE.format(name="gives")):
        group.run(gives, [(2 * STORE_BYTES,)])
    assert not group.is_broken
    assert group.run(gives, [(3,)]) == [bytes(3)]
