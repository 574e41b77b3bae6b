"""The switch ``use_legacy_worker_impl``: deprecated workers are found by entry point, never imported from here."""

import logging
from importlib.metadata import entry_points

from temper_engine_api.errors import ConfigError
from temper_trainer.config.deprecated_workers import GROUP, TRAINING_WORKER
from temper_trainer.config.run import TrainerConfig
from temper_trainer.config_loading.schema import Plain

logger = logging.getLogger(__name__)

_BOOLEANS = {True: "enable", False: "disable"}
"""The RFC's spelling."""


def read_switch(value: Plain) -> Plain:
    """The word for a boolean; anything else is left to the type check."""
    return _BOOLEANS[value] if isinstance(value, bool) else value


def check_worker_switch(config: TrainerConfig) -> None:
    """Warn about ``auto``; refuse ``enable`` where nothing can serve it.

    Raises:
        ConfigError: ``enable`` without the shim, with another engine than fsdp, or where no role would be trained by such a worker.
    """
    if config.use_legacy_worker_impl == "auto":
        logger.warning(
            "use_legacy_worker_impl=auto does the same as disable, the engine path, and will be refused in 0.3: remove it."
        )
    if config.use_legacy_worker_impl != "enable":
        return
    if TRAINING_WORKER not in {point.name for point in entry_points(group=GROUP)}:
        raise ConfigError(
            f"use_legacy_worker_impl is enable, but no package offers deprecated workers (entry points {GROUP!r}): "
            "pip install 'temper-legacy-shim[workers]', or set use_legacy_worker_impl=disable to run on engines."
        )
    if config.task == "sft":
        raise ConfigError(
            "use_legacy_worker_impl is enable in task sft, which deprecated workers never did: set it to disable."
        )
    if config.model_engine != "fsdp":
        raise ConfigError(
            f"use_legacy_worker_impl is enable and model_engine is {config.model_engine}, but temper-train drives the deprecated workers "
            "on fsdp alone: choose model_engine=fsdp, or set use_legacy_worker_impl=disable. Deprecated classes of other engines are for "
            "code of your own."
        )
