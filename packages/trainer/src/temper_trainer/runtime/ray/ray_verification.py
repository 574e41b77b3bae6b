"""Comparing a large checkpoint with its manifest by processes on all nodes of a Ray cluster."""

from pathlib import Path

import ray

from temper_engine_api.checkpoint import verify
from temper_engine_api.errors import CheckpointError
from temper_trainer.config.run import RuntimeConfig
from temper_trainer.runtime.ray.ray_runtime import connect_to_ray


def verify_on_cluster(directory: Path, *, num_ranks: int, runtime: RuntimeConfig) -> None:
    """Read every file once, divided among processes that Ray spreads over the nodes.

    Nothing is loaded before all of them have answered.

    Args:
        directory: a step directory.
        num_ranks: processes that read.
        runtime: where the cluster is.

    Raises:
        DamagedCheckpointError: If a file differs from its manifest.
        CheckpointError: If a process sees damage that the driver does not see, or died.
    """
    connect_to_ray(runtime)
    # Without CPUs of their own: they also run while the actors of the roles hold all of them.
    task = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_verify_share)
    refs = [task.remote(str(directory), rank, num_ranks) for rank in range(num_ranks)]
    for rank, ref in enumerate(refs):
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            # The driver decides: a node that does not see the folder must not condemn a checkpoint.
            verify(directory, shard=(rank, num_ranks))
            reason = str(getattr(error, "cause", None) or error).splitlines()[0]
            raise CheckpointError(
                f"{directory} is good as the driver sees it, but a process on another node failed to "
                f"verify it: {reason} Give a folder on a file system that all nodes share, or set "
                "run.verify_checkpoints=size."
            ) from error


def _verify_share(directory: str, rank: int, num_ranks: int) -> None:
    verify(directory, shard=(rank, num_ranks))
