"""Compare a large checkpoint with its manifest by processes on all nodes of a Ray cluster."""

from pathlib import Path

import ray

from temper_engine_api.checkpoint import verify
from temper_engine_api.errors import CheckpointError
from temper_trainer.config.run import RuntimeConfig
from temper_trainer.runtime.ray.ray_runtime import connect_to_ray


def verify_on_cluster(directory: Path, *, num_ranks: int, runtime: RuntimeConfig) -> None:
    """Read every file once, divided among processes that Ray spreads over the nodes.

    Args:
        directory: A step directory.
        num_ranks: Number of processes.
        runtime: Settings of the cluster.

    Raises:
        DamagedCheckpointError: If a file differs from its manifest.
        CheckpointError: If a process finds damage that the driver does not find, or died.
    """
    connect_to_ray(runtime)
    # num_cpus=0, because the actors of the roles may have reserved all CPUs.
    task = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(_verify_part)
    refs = [task.remote(str(directory), rank, num_ranks) for rank in range(num_ranks)]
    for rank, ref in enumerate(refs):
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            # The driver decides: on a node that does not have the file system, every file is
            # missing.
            verify(directory, shard=(rank, num_ranks))
            reason = str(getattr(error, "cause", None) or error).splitlines()[0]
            raise CheckpointError(
                f"the driver can verify {directory}, but a process on another node cannot: {reason} Use "
                "a file system that all nodes share, or set run.verify_checkpoints=size."
            ) from error


def _verify_part(directory: str, rank: int, num_ranks: int) -> None:
    verify(directory, shard=(rank, num_ranks))
