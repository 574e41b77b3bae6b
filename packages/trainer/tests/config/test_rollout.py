"""Test values that are derived from a sampler's configuration."""

import pytest

from temper_engine_api.specs import EngineConfig, ModelSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.config.rollout import RolloutConfig

MODEL = ModelSpec(path="model")


def make_engine_config(compute: str) -> EngineConfig:
    return EngineConfig(model=MODEL, precision=PrecisionSpec(compute=compute))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampler", "actor", "tolerance"),
    [("fp32", "fp32", 0.05), ("bf16", "bf16", 0.3), ("bf16", "fp32", 0.3), ("fp32", "bf16", 0.3)],
)
def test_canary_tolerance_is_larger_if_either_side_computes_in_bf16(
    sampler: str, actor: str, tolerance: float
) -> None:
    config = RolloutConfig(dtype=sampler)  # type: ignore[arg-type]
    assert config.resolve_canary_tolerance(make_engine_config(actor)) == tolerance


def test_canary_tolerance_is_larger_if_the_actor_multiplies_in_float8() -> None:
    actor = FSDPConfig(model=MODEL, float8="rowwise", precision=PrecisionSpec(compute="bf16"))
    assert RolloutConfig(dtype="bf16").resolve_canary_tolerance(actor) == 2.0


def test_configured_canary_tolerance_applies_to_every_dtype() -> None:
    config = RolloutConfig(dtype="bf16", canary_tolerance=1e-3)
    assert config.resolve_canary_tolerance(make_engine_config("bf16")) == 1e-3
