"""The deprecated classes as real Ray actors, as old drivers made them.

Ray.remote on the class, one actor a rank.
"""

import contextlib
import os
import random
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.deprecation import LegacyWorkerWarning
from temper_legacy_shim.workers import ActorRolloutRefWorker

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
pytestmark = pytest.mark.ray


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def find_port() -> int:
    """Return a free port that no other process gets before rank 0 listens, seconds later.

    The kernel gives out ports from 32768 on, and Ray gives 10002 to 19999 to its workers.
    """
    for port in random.sample(range(20000, 32768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("100 ports from 20000 to 32767 are in use")


# Nightly: test_golden_workers.py compares the same workers on two ranks without Ray.
@pytest.mark.nightly
@pytest.mark.bitwise
@pytest.mark.usefixtures("cluster")
def test_two_ray_actors_train_on_their_chunks_and_agree_with_each_other(
    actor_config: dict[str, Any], make_data: Callable[..., DataProto]
) -> None:
    actor_config["actor"]["ppo_mini_batch_size"] = 4
    port = find_port()
    actors = []
    for rank in range(2):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        env |= {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", LegacyWorkerWarning
            )  # comes once, where the class becomes remote
            remote = ray.remote(ActorRolloutRefWorker).options(
                num_cpus=1, runtime_env={"env_vars": env}
            )
        actors.append(remote.remote(config=actor_config, role="actor_rollout"))
    ray.get([actor.init_model.remote() for actor in actors], timeout=200)
    chunks = make_data(8).chunk(2)
    outputs = ray.get(
        [actor.update_actor.remote(chunk) for actor, chunk in zip(actors, chunks, strict=True)],
        timeout=200,
    )
    metrics = DataProto.concat(outputs).meta_info["metrics"]
    assert isinstance(metrics, dict)
    # 8 rows over 2 ranks in mini-batches of 4: two updates, whose norm is the same on both ranks.
    first, second = metrics["actor/grad_norm"]
    assert len(first) == 2
    assert first == second
    answers = ray.get(
        [actor.compute_log_prob.remote(make_data(8)) for actor in actors], timeout=200
    )
    assert torch.equal(answers[0].batch["old_log_probs"], answers[1].batch["old_log_probs"])


def test_the_warning_names_the_class_also_where_ray_wraps_it(actor_config: dict[str, Any]) -> None:
    with pytest.warns(
        LegacyWorkerWarning, match=r"fsdp_workers\.ActorRolloutRefWorker is deprecated"
    ):
        ActorRolloutRefWorker(actor_config, "actor")
