"""Settings of this engine; importable without torch, so that a configuration is checked before anything heavy is loaded."""

from dataclasses import dataclass

from temper_engine_api.specs import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MyConfig(EngineConfig):
    """What every engine has, and fields of this one: each with a docstring and its only default."""
