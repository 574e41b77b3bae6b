"""Compare a checkpoint with its manifest, in the driver or on all nodes in a cluster."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from temper_engine_api.checkpoint import verify
from temper_engine_api.errors import CheckpointError
from temper_trainer.config.run import RuntimeConfig

CLUSTER_BYTES = 8 << 30
"""Smaller checkpoints are read by threads in the driver: starting processes would take longer."""


def make_checkpoint_verifier(
    mode: Literal["size", "full"], *, runtime: RuntimeConfig, num_ranks: int
) -> Callable[[Path], object]:
    """Return a function that verifies a step directory and raises the same errors as `verify`.

    Args:
        mode: Value of `run.verify_checkpoints`.
        runtime: Settings of the cluster.
        num_ranks: Number of processes that divide a large checkpoint's files among them on Ray,
            spread across nodes.
    """
    if mode == "size":
        return partial(verify, with_content=False)
    if runtime.kind == "inline" or num_ranks == 1:
        return verify
    return partial(_verify_on_ray, num_ranks=num_ranks, runtime=runtime)


def _verify_on_ray(directory: Path, *, num_ranks: int, runtime: RuntimeConfig) -> None:
    # The driver checks manifest and sizes first, which finds most damage without starting anything.
    if verify(directory, with_content=False).num_bytes < CLUSTER_BYTES:
        verify(directory)
        return
    verify_on_cluster(directory, num_ranks=num_ranks, runtime=runtime)


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
    # Imported late, because Ray is an extra.
    import ray

    from temper_trainer.runtime.ray.ray_runtime import connect_to_ray

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
                f"the driver can verify {directory}, but a process on another node cannot: "
                f"{reason} Use a file system that all nodes share, or set "
                "run.verify_checkpoints=size."
            ) from error


def _verify_part(directory: str, rank: int, num_ranks: int) -> None:
    verify(directory, shard=(rank, num_ranks))
