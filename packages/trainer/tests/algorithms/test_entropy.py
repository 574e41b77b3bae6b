"""The controller of the entropy bonus."""

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.adaptive_coefficients import build_entropy_controller
from temper_trainer.config.algorithm import AlgorithmConfig, EntropyControllerConfig


def test_coefficient_rises_below_the_target_and_falls_to_zero_above_it() -> None:
    controller = build_entropy_controller(
        AlgorithmConfig(entropy_controller=EntropyControllerConfig(target=0.5, coef_step=0.01))
    )
    raised = controller.adapt(entropy=0.4).adapt(entropy=0.4)
    assert raised.coef == pytest.approx(0.02)
    assert raised.adapt(entropy=0.6).coef == pytest.approx(0.01)
    assert controller.adapt(entropy=0.6).coef == 0.0


def test_bonus_is_applied_only_after_a_step_at_or_below_the_target() -> None:
    controller = build_entropy_controller(
        AlgorithmConfig(
            entropy_coef=0.02,
            entropy_controller=EntropyControllerConfig(target=0.5, coef_step=0.01),
        )
    )
    assert controller.applied_coef == 0.02
    above = controller.adapt(entropy=0.6)
    assert (above.coef, above.applied_coef) == (pytest.approx(0.01), 0.0)
    assert above.adapt(entropy=0.4).applied_coef == pytest.approx(0.02)
    # At the target the weight is lowered, and still applied.
    assert controller.adapt(entropy=0.5).applied_coef == pytest.approx(0.01)


def test_sum_of_bonuses_above_the_target_is_zero() -> None:
    controller = build_entropy_controller(
        AlgorithmConfig(entropy_controller=EntropyControllerConfig(target=0.5))
    )
    for _ in range(20):
        controller = controller.adapt(entropy=0.4)
    assert controller.applied_coef == pytest.approx(0.02)
    applied = 0.0
    for _ in range(20):
        controller = controller.adapt(entropy=0.6)
        applied += controller.applied_coef
    assert applied == 0.0


def test_coefficient_has_an_upper_bound() -> None:
    controller = build_entropy_controller(
        AlgorithmConfig(
            entropy_controller=EntropyControllerConfig(target=0.5, coef_step=0.3, coef_max=0.5)
        )
    )
    for _ in range(5):
        controller = controller.adapt(entropy=0.1)
    assert controller.coef == 0.5


@pytest.mark.parametrize("coef", [0.6, -0.1])
def test_initial_coefficient_outside_the_controllers_bounds_is_refused(coef: float) -> None:
    controller = EntropyControllerConfig(target=0.5, coef_max=0.5)
    with pytest.raises(ConfigError, match=r"must be between 0 and its coef_max 0\.5"):
        AlgorithmConfig(entropy_coef=coef, entropy_controller=controller)


def test_without_a_target_the_coefficient_is_fixed() -> None:
    controller = build_entropy_controller(AlgorithmConfig(entropy_coef=-0.1)).adapt(entropy=0.0)
    assert (controller.coef, controller.applied_coef) == (-0.1, -0.1)
