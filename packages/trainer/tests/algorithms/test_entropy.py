"""The controller of the entropy bonus."""

import pytest

from temper_trainer.algorithms.adaptive_coefficients import build_entropy_controller
from temper_trainer.config.algorithm import AlgorithmConfig


def test_coefficient_rises_below_the_target_and_falls_to_zero_above_it() -> None:
    controller = build_entropy_controller(
        AlgorithmConfig(entropy_target=0.5, entropy_coef_step=0.01)
    )
    raised = controller.adapt(entropy=0.4).adapt(entropy=0.4)
    assert raised.coef == pytest.approx(0.02)
    assert raised.adapt(entropy=0.6).coef == pytest.approx(0.01)
    assert controller.adapt(entropy=0.6).coef == 0.0


def test_without_a_target_the_coefficient_is_fixed() -> None:
    assert (
        build_entropy_controller(AlgorithmConfig(entropy_coef=-0.1)).adapt(entropy=0.0).coef == -0.1
    )
