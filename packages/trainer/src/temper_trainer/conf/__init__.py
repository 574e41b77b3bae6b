"""Configuration groups as YAML, read by Hydra; defaults are in ``temper_trainer.config``."""
