"""The switch ``use_legacy_worker_impl``: deprecated workers are found by entry point, never imported from here."""

import logging
from importlib.metadata import entry_points

from temper_engine_api.errors import ConfigError
from temper_trainer.config.run import TrainerConfig

logger = logging.getLogger(__name__)

GROUP = "temper.legacy_workers"
"""Entry-point group that temper-legacy-shim fills."""


def check_worker_switch(config: TrainerConfig) -> None:
    """Warn about ``auto``; refuse ``enable`` where nothing can serve it.

    Raises:
        ConfigError: ``enable`` without the shim, or with one whose workers this release can't drive.
    """
    if config.use_legacy_worker_impl == "auto":
        logger.warning("use_legacy_worker_impl=auto does the same as disable, the engine path, and will be refused in 0.3: remove it.")
    if config.use_legacy_worker_impl != "enable":
        return
    found = sorted(point.name for point in entry_points(group=GROUP))
    if not found:
        raise ConfigError(
            f"use_legacy_worker_impl is enable, but no package offers deprecated workers (entry points {GROUP!r}): they will "
            "come with temper-legacy-shim; set use_legacy_worker_impl=disable to run on engines."
        )
    raise ConfigError(
        f"use_legacy_worker_impl is enable, and the deprecated workers {', '.join(found)} are installed, but temper-trainer 0.1 drives "
        "engines only: set use_legacy_worker_impl=disable."
    )
