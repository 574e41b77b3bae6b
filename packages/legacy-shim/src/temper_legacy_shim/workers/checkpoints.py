"""Saving and loading under the old method names: Temper's own layout is written, an old one is pointed to its converter."""

from pathlib import Path

from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import ConfigError


def save(engine: BaseEngine, local_path: str, hdfs_path: str | None, *, step: int, max_to_keep: int | None) -> None:
    """Save a step directory below ``local_path`` in the engine's layout. Collective."""
    engine.save_checkpoint(local_path, hdfs_path, global_step=step, max_ckpt_to_keep=max_to_keep)


def load(engine: BaseEngine, local_path: str | None, hdfs_path: str | None, *, delete_download: bool) -> None:
    """Load the last complete step below ``local_path``; None loads nothing, as before. Collective.

    Raises:
        ConfigError: the folder holds a checkpoint of the older generation.
    """
    if local_path is None:
        return
    old = sorted(Path(local_path).glob("model_world_size_*_rank_*.pt")) or sorted(Path(local_path).glob("dist_ckpt"))
    if old:
        raise ConfigError(
            f"{local_path} holds a checkpoint of the older generation ({old[0].name}): convert it with "
            f"`temper-migrate checkpoint {local_path} --to temper --out NEW` and load NEW."
        )
    # The old critic and Megatron workers set it by default, also where nothing was downloaded.
    engine.load_checkpoint(local_path, hdfs_path, del_local_after_load=delete_download and hdfs_path is not None)
