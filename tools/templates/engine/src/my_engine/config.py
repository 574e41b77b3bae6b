"""Settings of this engine.

This module must not import torch: configurations are checked before heavy libraries are loaded.
"""

from dataclasses import dataclass

from temper_engine_api.specs import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MyConfig(EngineConfig):
    """Add your own settings here, each with a docstring and its only default."""
