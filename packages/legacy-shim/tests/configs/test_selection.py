"""Which completions count and how much, in the words of each release, against what the release did."""

import pytest

from temper_legacy_shim.configs import Outcome, Translation
from temper_legacy_shim.configs.reading.config_values import Plain

from .conftest import rules_found, translated, values

FIRST = "algorithm.rollout_is"
LATER = "algorithm.rollout_correction"


def _first(**asked: object) -> Translation:
    """v0.6.0, with the correction switched on."""
    return translated("v0.6.0", f"{FIRST}=True", *(f"{FIRST}_{name}={value}" for name, value in asked.items()))


def _later(**asked: object) -> Translation:
    return translated("v0.7.0", *(f"{LATER}.{name}={value}" for name, value in asked.items()))


def _corrected(found: Translation) -> dict[str, Plain]:
    block = "algorithm.rollout_correction."
    return {key.removeprefix(block): value for key, value in values(found).items() if key.startswith(block)}


def test_the_first_release_capped_weights_or_left_out_what_lay_outside() -> None:
    assert _corrected(_first(threshold=3.0)) == {"level": "token", "truncate_at": 3.0}
    masked = _corrected(_first(threshold=4.0, mode="mask", level="sequence"))
    assert masked == {"level": "sequence", "truncate_at": None, "mask_high": 4.0, "mask_low": 0.25}  # 1 / 4
    assert _corrected(_first(threshold=4.0, threshold_lower=0.5, mode="mask"))["mask_low"] == 0.5


def test_the_first_release_corrected_nothing_without_a_threshold() -> None:
    found = _first()
    assert _corrected(found) == {}
    assert found.tokens[-1].reason == "Without rollout_is_threshold, which is null, v0.6.0 corrected nothing."
    assert "correction" not in rules_found(found, "hazard")


@pytest.mark.parametrize(
    ("found", "is_told"),
    [
        (_first(threshold=2.0), True),  # 1e-4 unless somebody said otherwise
        (_first(threshold=2.0, veto_threshold="null"), False),
        (_later(rollout_is="token"), False),
        (_later(rollout_is="token", rollout_token_veto_threshold=0.001), True),
    ],
)
def test_completions_that_one_token_vetoed_are_trained_on_here_which_is_said(found: Translation, is_told: bool) -> None:
    told = [finding.message for finding in found.findings if finding.level == "hazard" and finding.rule == "correction"]
    assert bool(told) is is_told
    assert all("veto_threshold" in each and "trained on here" in each for each in told)


@pytest.mark.parametrize(("level", "is_told"), [("token", False), ("sequence", True)])
def test_normalized_weights_of_sequences_are_a_hazard(level: str, is_told: bool) -> None:
    found = _later(rollout_is=level, rollout_is_threshold=2.0, rollout_is_batch_normalize=True)
    assert _corrected(found)["self_normalize"] is True
    told = [finding.message for finding in found.findings if finding.level == "hazard" and finding.rule == "correction"]
    assert [each for each in told if "mean over sequences; here it is the mean over trained tokens" in each] == told
    assert bool(told) is is_told


def test_a_level_that_is_not_here_is_left_out_and_said() -> None:
    for found in (_first(threshold=2.0, level="geometric", veto_threshold="null"), _later(rollout_is="geometric")):
        assert _corrected(found) == {}
        assert "correction" in rules_found(found, "hazard")


@pytest.mark.parametrize(
    ("asked", "corrected"),
    [
        (
            {"rollout_is": "token", "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True},
            {"level": "token", "truncate_at": 3.0, "self_normalize": True},
        ),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": 2.0},
            {"level": "token", "mask_only": True, "mask_high": 2.0, "mask_low": 0.5},  # 1 / 2
        ),
        (
            {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_1.6"},
            {"level": "token", "truncate_at": 2.0, "mask_high": 2.0, "mask_low": 0.625},  # 1 / 0.5, 1 / 1.6
        ),
        (
            {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
            {"level": "none", "reject_kl": 0.01, "reject_kl_estimator": "k3"},
        ),
        ({"bypass_mode": True}, {"level": "none", "proximal": "rollout"}),
        ({"bypass_mode": True, "rollout_is": "token"}, {"level": "none", "proximal": "rollout"}),
    ],
)
def test_later_releases_named_weights_and_rejection_apart(asked: dict[str, object], corrected: dict[str, Plain]) -> None:
    assert _corrected(_later(**asked)) == corrected


def test_two_levels_at_once_are_one_and_the_other_is_said() -> None:
    found = _later(rollout_is="token", rollout_rs="sequence", rollout_rs_threshold=2.0)
    assert _corrected(found) == {"level": "token", "truncate_at": 2.0}
    assert "correction" in rules_found(found, "hazard")


def test_a_loss_on_the_samplers_own_log_probs_is_asked_about() -> None:
    found = _later(bypass_mode=True, loss_type="reinforce")
    assert found.outcome is Outcome.PERSON
    assert "correction" in rules_found(found, "person")


def test_completions_are_drawn_anew_by_their_rewards_as_they_were() -> None:
    block = "algorithm.pf_ppo"
    power = values(translated("v0.7.0", "algorithm.use_pf_ppo=True", f"{block}.weight_pow=3.0"))
    assert (power["algorithm.reweight.method"], power["algorithm.reweight.exponent"]) == ("power", 3.0)
    most = values(translated("v0.7.0", "algorithm.use_pf_ppo=True", f"{block}.reweight_method=max_min"))
    assert most["algorithm.reweight.method"] == "max_min"
    assert "pf-ppo" in rules_found(translated("v0.7.0", "algorithm.use_pf_ppo=True", f"{block}.reweight_method=best"), "person")


def test_the_cap_before_the_first_release_is_the_cap() -> None:
    cap = "+actor_rollout_ref.actor.tis_imp_ratio_cap"
    assert _corrected(translated("v0.5.0", f"{cap}=3")) == {"truncate_at": 3.0}
    assert _corrected(translated("v0.5.0", f"{cap}=-1")) == {}
