"""Comparing a checkpoint with its manifest, on the driver or on all nodes of the cluster."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from temper_engine_api.checkpoint import verify
from temper_trainer.config.trainer_config import TrainerConfig

CLUSTER_BYTES = 8 << 30
"""Smaller checkpoints are read by the driver's threads: starting processes would take longer."""


def make_checkpoint_verifier(config: TrainerConfig) -> Callable[[Path], object]:
    """Return what compares a step directory with its manifest, as run.verify_checkpoints says.

    It raises what ``verify`` raises. On the ray runtime, the files of a large checkpoint are divided
    among as many processes as the actor has workers, spread over the nodes.
    """
    if config.run.verify_checkpoints == "size":
        return partial(verify, with_content=False)
    if config.runtime.kind == "inline" or config.actor.num_workers == 1:
        return verify
    return partial(_verify_large, config=config)


def _verify_large(directory: Path, *, config: TrainerConfig) -> None:
    # Manifest and sizes first, by the driver: most damage is found without starting anything.
    if verify(directory, with_content=False).num_bytes < CLUSTER_BYTES:
        verify(directory)
        return
    from temper_trainer.runtime.ray.ray_verification import verify_on_cluster

    verify_on_cluster(directory, num_ranks=config.actor.num_workers, runtime=config.runtime)
