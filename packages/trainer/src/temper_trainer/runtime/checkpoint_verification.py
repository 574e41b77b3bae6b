"""Compare a checkpoint with its manifest, by the driver or by processes on all nodes of a cluster."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from temper_engine_api.checkpoint import verify
from temper_trainer.config.trainer_config import TrainerConfig

CLUSTER_BYTES = 8 << 30
"""Smaller checkpoints are read by threads of the driver: starting processes would take longer."""


def make_checkpoint_verifier(config: TrainerConfig) -> Callable[[Path], object]:
    """Return a function that verifies a step directory as `run.verify_checkpoints` asks.

    It raises the same errors as `verify`. On Ray, the files of a large checkpoint are divided
    among as many processes as the actor has workers, spread over the nodes.
    """
    if config.run.verify_checkpoints == "size":
        return partial(verify, with_content=False)
    if config.runtime.kind == "inline" or config.actor.num_workers == 1:
        return verify
    return partial(_verify_on_ray, config=config)


def _verify_on_ray(directory: Path, *, config: TrainerConfig) -> None:
    # The driver checks manifest and sizes first, which finds most damage without starting anything.
    if verify(directory, with_content=False).num_bytes < CLUSTER_BYTES:
        verify(directory)
        return
    # Imported late: Ray is an extra.
    from temper_trainer.runtime.ray.ray_verification import verify_on_cluster

    verify_on_cluster(directory, num_ranks=config.actor.num_workers, runtime=config.runtime)
