"""Selection and weighting of completions, by the keys of each release."""

import pytest

from temper_legacy_shim.configs import Outcome, Translation
from temper_legacy_shim.configs.reading.config_values import Plain

from .conftest import rules_found, translated, values
from .test_effective_values import effective

FIRST = "algorithm.rollout_is"
LATER = "algorithm.rollout_correction"


def _first(**requested: object) -> Translation:
    """Return the keys of v0.6.0 with the correction on."""
    return translated(
        "v0.6.0", f"{FIRST}=True", *(f"{FIRST}_{name}={value}" for name, value in requested.items())
    )


def _later(**requested: object) -> Translation:
    return translated("v0.7.0", *(f"{LATER}.{name}={value}" for name, value in requested.items()))


def _corrected(result: Translation) -> dict[str, Plain]:
    block = "algorithm.rollout_correction."
    return {
        key.removeprefix(block): value
        for key, value in values(result).items()
        if key.startswith(block)
    }


def test_the_first_release_capped_weights_or_left_out_what_lay_outside() -> None:
    veto = {"reject.ratio_max.low": 1e-4}  # its default
    assert _corrected(_first(threshold=3.0)) == {"name": "token", "truncate_at": 3.0, **veto}
    masked = _corrected(_first(threshold=4.0, mode="mask", level="sequence"))
    bounds = {"reject.ratio_sum.high": 4.0, "reject.ratio_sum.low": 0.25}  # 1 / 4
    assert masked == {"name": "sequence", "truncate_at": None, **bounds, **veto}
    assert (
        _corrected(_first(threshold=4.0, threshold_lower=0.5, mode="mask"))[
            "reject.ratio_token.low"
        ]
        == 0.5
    )


def test_the_first_release_corrected_nothing_without_a_threshold() -> None:
    result = _first()
    assert _corrected(result) == {}
    assert (
        result.tokens[-1].reason
        == "Without rollout_is_threshold, which is null, v0.6.0 corrected nothing."
    )
    assert "correction" not in rules_found(result, "hazard")


@pytest.mark.parametrize(
    ("result", "is_reported"),
    [
        (_first(threshold=2.0), True),  # 1e-4 unless somebody said otherwise
        (_first(threshold=2.0, veto_threshold="null"), False),
        (_later(rollout_is="token"), False),
        (_later(rollout_is="token", rollout_token_veto_threshold=0.001), True),
    ],
)
def test_completions_that_one_token_vetoed_are_rejected_and_stay_in_the_denominator(
    result: Translation, is_reported: bool
) -> None:
    reported = [
        finding.message
        for finding in result.findings
        if finding.level == "hazard" and finding.rule == "correction"
    ]
    assert bool(reported) is is_reported is ("reject.ratio_max.low" in _corrected(result))
    assert all("veto_threshold" in each and "denominator" in each for each in reported)


@pytest.mark.parametrize(("level", "is_reported"), [("token", False), ("sequence", True)])
def test_normalized_weights_of_sequences_are_a_hazard(level: str, is_reported: bool) -> None:
    result = _later(rollout_is=level, rollout_is_threshold=2.0, rollout_is_batch_normalize=True)
    assert _corrected(result)["self_normalize"] is True
    reported = [
        finding.message
        for finding in result.findings
        if finding.level == "hazard" and finding.rule == "correction"
    ]
    assert [
        each
        for each in reported
        if "mean over sequences; here it is the mean over trained tokens" in each
    ] == reported
    assert bool(reported) is is_reported


def test_a_level_that_is_not_here_is_left_out_and_reported() -> None:
    for result in (
        _first(threshold=2.0, level="geometric", veto_threshold="null"),
        _later(rollout_is="geometric"),
    ):
        assert _corrected(result) == {}
        assert "correction" in rules_found(result, "hazard")


@pytest.mark.parametrize(
    ("requested", "corrected"),
    [
        (
            {
                "rollout_is": "token",
                "rollout_is_threshold": 3.0,
                "rollout_is_batch_normalize": True,
            },
            {"name": "token", "truncate_at": 3.0, "self_normalize": True},
        ),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": 2.0},
            {
                "name": "mask",
                "reject.ratio_token.high": 2.0,
                "reject.ratio_token.low": 0.5,
            },  # 1 / 2
        ),
        (
            {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_1.6"},
            # 1 / 0.5, 1 / 1.6
            {
                "name": "token",
                "truncate_at": 2.0,
                "reject.ratio_token.high": 2.0,
                "reject.ratio_token.low": 0.625,
            },
        ),
        (
            {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
            {"name": "mask", "reject.k3_mean.high": 0.01},
        ),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.25"},
            {"name": "mask", "reject.ratio_mean.low": 0.8, "reject.ratio_mean.high": 1.25},
        ),
        (
            {
                "rollout_rs": "geometric",
                "rollout_rs_threshold": 1.001,
                "rollout_rs_threshold_lower": 0.99,
            },
            {"name": "mask", "reject.ratio_mean.low": 0.99, "reject.ratio_mean.high": 1.001},
        ),
        (
            {
                "rollout_is": "sequence",
                "rollout_rs": "'token_k1,seq_max_k2,seq_sum_k3'",
                "rollout_rs_threshold": "'0.5_2.0,0.3,4.0'",
            },
            {
                "name": "sequence",
                "truncate_at": 2.0,
                "reject.ratio_token.low": 0.5,
                "reject.ratio_token.high": 2.0,
                "reject.k2_max.high": 0.3,
                "reject.k3_sum.high": 4.0,
            },
        ),
        (
            {"rollout_rs": "'token_k2,token_k3'", "rollout_rs_threshold": 0.1},
            {"name": "mask", "reject.k2_token.high": 0.1, "reject.k3_token.high": 0.1},
        ),
        (
            {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            {
                "name": "rollout_ratio",
                "reject.ratio_token.low": 0.5,
                "reject.ratio_token.high": 2.0,
            },
        ),
        ({"bypass_mode": True}, {"name": "rollout_ratio"}),
        ({"bypass_mode": True, "rollout_is": "token"}, {"name": "rollout_ratio"}),
    ],
)
def test_later_releases_named_weights_and_rejection_apart(
    requested: dict[str, object], corrected: dict[str, Plain]
) -> None:
    assert _corrected(_later(**requested)) == corrected


def test_weights_of_one_level_go_with_rejection_by_another() -> None:
    result = _later(rollout_is="token", rollout_rs="sequence", rollout_rs_threshold=2.0)
    bounds = {"reject.ratio_sum.low": 0.5, "reject.ratio_sum.high": 2.0}
    assert _corrected(result) == {"name": "token", "truncate_at": 2.0, **bounds}


def test_an_unknown_rule_is_left_out_and_reported() -> None:
    result = _later(rollout_rs="'token_k1,seq_median_k2'", rollout_rs_threshold=2.0)
    assert set(_corrected(result)) == {"name", "reject.ratio_token.low", "reject.ratio_token.high"}
    assert any("seq_median_k2, for which" in finding.message for finding in result.findings)


def test_a_loss_on_the_samplers_own_log_probs_is_a_question() -> None:
    result = _later(bypass_mode=True, loss_type="reinforce")
    assert result.outcome is Outcome.PERSON
    assert "correction" in rules_found(result, "person")


def test_completions_are_drawn_again_by_their_rewards_as_they_were() -> None:
    block = "algorithm.pf_ppo"

    def resampled(*more: str) -> Translation:
        gae = ("algorithm.adv_estimator=gae", "critic.model.path=/models/q")
        return translated("v0.7.0", *gae, "algorithm.use_pf_ppo=True", *more)

    power = values(resampled(f"{block}.weight_pow=3.0"))
    assert (power["algorithm.reweight.name"], power["algorithm.reweight.exponent"]) == (
        "power",
        3.0,
    )
    most = values(resampled(f"{block}.reweight_method=max_min"))
    assert most["algorithm.reweight.name"] == "max_min"
    assert "pf-ppo" in rules_found(resampled(f"{block}.reweight_method=best"), "person")


def test_block_of_the_second_drawing_that_v0_4_1_did_not_read_is_a_hazard() -> None:
    # ray_trainer.py of v0.4.1: config.get("pf_ppo_reweight_method", "pow") in the block algorithm.
    gae = ("algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=True")
    block = ("algorithm.pf_ppo.reweight_method=max_min", "algorithm.pf_ppo.weight_pow=3.0")
    read, unread = (translated(version, *gae, *block) for version in ("v0.4.0", "v0.4.1"))
    assert effective(read, "algorithm.reweight.name") == "max_min"
    assert effective(unread, "algorithm.reweight.name") == "power"
    assert effective(unread, "algorithm.reweight.exponent") is None  # 2, the default of both
    assert [token.disposition for token in unread.tokens[-2:]] == ["dropped"] * 2
    (hazard,) = [each.message for each in unread.findings if each.rule == "pf-ppo"]
    assert "v0.4.1 did not read algorithm.pf_ppo.reweight_method=max_min" in hazard
    flat = ("+algorithm.pf_ppo_reweight_method=pow", "+algorithm.pf_ppo_weight_pow=3.0")
    run = translated("v0.4.1", *gae, *flat)
    assert effective(run, "algorithm.reweight.exponent") == 3.0
    assert "pf-ppo" not in rules_found(run, "hazard")
    assert [token.disposition for token in run.tokens[-2:]] == ["mapped"] * 2
    other = translated("v0.7.0", *gae, *flat).tokens[-2:]
    assert [token.disposition for token in other] == ["dropped"] * 2


@pytest.mark.parametrize(
    ("method", "is_hazard"), [("pow", False), ("max_min", True), ("max_random", True)]
)
def test_drawing_over_the_step_and_not_over_groups_is_a_hazard(
    method: str, *, is_hazard: bool
) -> None:
    # compute_pf_ppo_reweight_data compares the scores of all completions; algorithm.reweight draws
    # by group, except for power.
    given = ("algorithm.use_pf_ppo=True", f"algorithm.pf_ppo.reweight_method={method}")
    run = translated("v0.9.1", "algorithm.adv_estimator=gae", *given)
    assert ("pf-ppo" in rules_found(run, "hazard")) == is_hazard


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
@pytest.mark.parametrize("version", ["v0.4.1", "v0.7.0", "v0.9.0"])
def test_completions_are_drawn_again_with_gae_only(version: str, estimator: str) -> None:
    # ray_trainer.py: compute_advantage reads use_pf_ppo in the branch of GAE.
    given = ("+" * (version == "v0.4.1")) + "algorithm.use_pf_ppo=True"
    run = translated(version, f"algorithm.adv_estimator={estimator}", given)
    assert not [key for key in values(run) if key.startswith("algorithm.reweight")]
    assert (run.tokens[-1].disposition, "gae alone" in run.tokens[-1].reason) == ("dropped", True)


def test_the_cap_before_the_first_release_is_the_cap() -> None:
    cap = "+actor_rollout_ref.actor.tis_imp_ratio_cap"
    assert _corrected(translated("v0.5.0", f"{cap}=3")) == {"name": "token", "truncate_at": 3.0}
    assert _corrected(translated("v0.5.0", f"{cap}=-1")) == {}
