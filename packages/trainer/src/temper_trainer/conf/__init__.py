"""Choices as YAML, read by Hydra; no default lives here, those are on the dataclasses of ``temper_trainer.config``."""
