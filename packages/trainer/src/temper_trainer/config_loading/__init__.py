"""From group choices, YAML files and the command line to a frozen TrainerConfig; Hydra ends here."""

from temper_trainer.config_loading.loaded import LoadedConfig, printed, write_resolved
from temper_trainer.config_loading.loading import load

__all__ = ["LoadedConfig", "load", "printed", "write_resolved"]
