"""Load group choices, YAML files and overrides into a frozen TrainerConfig; Hydra ends here."""

from temper_trainer.config_loading.loading import load
from temper_trainer.config_loading.resolved_config import (
    LoadedConfig,
    format_config,
    write_resolved,
)

__all__ = ["LoadedConfig", "format_config", "load", "write_resolved"]
