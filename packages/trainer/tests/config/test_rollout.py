"""Test values that are derived from a sampler's configuration."""

import pytest

from temper_trainer.config.rollout import RolloutConfig


@pytest.mark.parametrize(
    ("sampler", "actor", "tolerance"),
    [("fp32", "fp32", 0.05), ("bf16", "bf16", 0.3), ("bf16", "fp32", 0.3), ("fp32", "bf16", 0.3)],
)
def test_canary_tolerance_is_larger_if_either_side_computes_in_bf16(
    sampler: str, actor: str, tolerance: float
) -> None:
    config = RolloutConfig(dtype=sampler)  # type: ignore[arg-type]
    assert config.resolve_canary_tolerance(actor) == tolerance


def test_configured_canary_tolerance_applies_to_every_dtype() -> None:
    config = RolloutConfig(dtype="bf16", canary_tolerance=1e-3)
    assert config.resolve_canary_tolerance("bf16") == 1e-3
