"""What a sampler's configuration resolves to."""

import pytest

from temper_trainer.config.rollout import RolloutConfig


@pytest.mark.parametrize(
    ("sampler", "actor", "tolerance"),
    [("fp32", "fp32", 0.05), ("bf16", "bf16", 0.3), ("bf16", "fp32", 0.3), ("fp32", "bf16", 0.3)],
)
def test_canary_accepts_more_where_either_side_computes_in_bf16(
    sampler: str, actor: str, tolerance: float
) -> None:
    config = RolloutConfig(dtype=sampler)  # type: ignore[arg-type]
    assert config.resolve_canary_tolerance(actor) == tolerance


def test_given_canary_tolerance_holds_for_every_dtype() -> None:
    config = RolloutConfig(dtype="bf16", canary_tolerance=1e-3)
    assert config.resolve_canary_tolerance("bf16") == 1e-3
