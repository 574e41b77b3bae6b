"""PPO's relatives in the old algorithms' traces against the trainer's.

Equal, or different in the way that docs/migration/workers.md says.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from golden_traces import GOLDEN, assert_close, core_calls, json_of, needs_golden, tensors_of
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from test_core_against_trainer import CORE, MODES, case_of, column, grid, old, samples_of, unbiased

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.advantages.estimators.group_estimators import (
    Gdpo,
    Gpg,
    Grpo,
    Opo,
    ReMax,
)
from temper_trainer.algorithms.advantages.estimators.optimal_token_baseline import (
    compute_optimal_token_baseline_advantages,
)
from temper_trainer.algorithms.advantages.estimators.pass_rate_estimators import GrpoPassk
from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
from temper_trainer.algorithms.importance_weights import compute_rollout_correction
from temper_trainer.algorithms.objectives.policy_objective import (
    CORRECTION_WEIGHTS,
    PolicyObjective,
)
from temper_trainer.algorithms.policy_losses.clipped_losses import Cispo, Gmpo, Gspo, Sapo
from temper_trainer.algorithms.policy_losses.covariance_losses import IS_SELECTED, ClipCov, KlCov
from temper_trainer.algorithms.policy_losses.divergence_losses import Dppo
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.rollout_correction import SequenceWeights, TokenWeights

pytestmark = needs_golden


def calls(group: str) -> list[str]:
    """Yield the calls with one rank's own counts.

    With the full mini-batch's, the old losses differ as ``agg_loss``.
    """
    return [
        call for call in core_calls("v0.7.1", group) if not call.startswith("global_batch_info")
    ]


def clips(case: Mapping[str, Any]) -> dict[str, float]:
    config = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **case["config"]}
    low, high = (
        config["clip_ratio"] if config[name] is None else config[name]
        for name in ("clip_ratio_low", "clip_ratio_high")
    )
    return {"clip_low": low, "clip_high": high}


def samples_for(group: str, call: str) -> SequenceBatch:
    case, mask = case_of(group, call)
    columns = {
        "advantages": column(case["advantages"]),
        "old_logprobs": column(case["old_log_prob"]),
    }
    if case["rollout_is_weights"] is not None:
        columns[CORRECTION_WEIGHTS] = column(case["rollout_is_weights"])
    return samples_of(mask, **columns)


def computed(
    objective: PolicyObjective, samples: SequenceBatch, logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss, and its gradient [B, width]."""
    leaf = logprobs.clone().requires_grad_()
    terms = objective(HeadOutputs(columns={HeadOutput.LOGPROB: leaf}), samples)
    loss = reduce_loss(
        terms, samples, denominators=count_denominators(samples), aggregation=objective.aggregation
    )
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), grid(leaf.grad)


def logprobs_of(group: str, call: str) -> Tensor:
    case, mask = case_of(group, call)
    return samples_of(mask, x=column(case["log_prob"])).columns["x"]


@pytest.mark.parametrize("call", calls("policy_loss_cispo"))
def test_cispo_agrees(call: str) -> None:
    case, samples = case_of("policy_loss_cispo", call)[0], samples_for("policy_loss_cispo", call)
    objective = PolicyObjective(
        loss=Cispo(**clips(case)),
        uses_correction_weights=CORRECTION_WEIGHTS in samples.columns,
        aggregation=MODES[case["loss_agg_mode"]],
    )
    loss, gradient = computed(objective, samples, logprobs_of("policy_loss_cispo", call))
    assert_close(loss, old("policy_loss_cispo", f"{call}.loss"))
    assert_close(gradient, old("policy_loss_cispo", f"{call}.grad_log_prob"))


@pytest.mark.parametrize("call", calls("policy_loss_gspo"))
def test_gspo_agrees_where_the_mean_is_of_completions_which_the_old_one_took_whatever_was_requested(
    call: str,
) -> None:
    case, samples = case_of("policy_loss_gspo", call)[0], samples_for("policy_loss_gspo", call)
    objective = PolicyObjective(
        loss=Gspo(**clips(case)),
        uses_correction_weights=CORRECTION_WEIGHTS in samples.columns,
        aggregation=MODES["seq-mean-token-mean"],
    )
    loss, gradient = computed(objective, samples, logprobs_of("policy_loss_gspo", call))
    assert_close(loss, old("policy_loss_gspo", f"{call}.loss"))
    assert_close(gradient, old("policy_loss_gspo", f"{call}.grad_log_prob"))


@pytest.mark.parametrize("call", calls("policy_loss_sapo"))
def test_sapo_agrees_where_the_mean_is_of_completions_which_the_old_one_took_whatever_was_requested(
    call: str,
) -> None:
    config, samples = (
        case_of("policy_loss_sapo", call)[0]["config"],
        samples_for("policy_loss_sapo", call),
    )
    objective = PolicyObjective(
        loss=Sapo(
            positive_temperature=config.get("tau_pos", 1.0),
            negative_temperature=config.get("tau_neg", 1.05),
        ),
        uses_correction_weights=CORRECTION_WEIGHTS in samples.columns,
        aggregation=MODES["seq-mean-token-mean"],
    )
    loss, gradient = computed(objective, samples, logprobs_of("policy_loss_sapo", call))
    assert_close(loss, old("policy_loss_sapo", f"{call}.loss"))
    assert_close(gradient, old("policy_loss_sapo", f"{call}.grad_log_prob"))


@pytest.mark.parametrize("call", calls("policy_loss_geo_mean"))
def test_gmpo_agrees_but_for_untrained_completions_and_the_position_of_correction_weights(
    call: str,
) -> None:
    case, samples = (
        case_of("policy_loss_geo_mean", call)[0],
        samples_for("policy_loss_geo_mean", call),
    )
    uses_correction_weights = CORRECTION_WEIGHTS in samples.columns
    objective = PolicyObjective(
        loss=Gmpo(**clips(case)),
        uses_correction_weights=uses_correction_weights,
        aggregation=MODES["seq-mean-token-mean"],
    )
    loss, gradient = computed(objective, samples, logprobs_of("policy_loss_geo_mean", call))
    expected, expected_gradient = (
        old("policy_loss_geo_mean", f"{call}.{name}") for name in ("loss", "grad_log_prob")
    )
    # Here each token's loss is weighted; there a completion's, by the geometric mean of its
    # weights.
    if uses_correction_weights:
        assert not torch.allclose(loss, expected, rtol=1e-3)
        return
    # One row of eight is empty: the old mean counts it, ours is over the completions that train.
    fraction = 7 / 8 if "emptyrow" in call else 1.0
    assert_close(fraction * loss, expected)
    assert_close(fraction * gradient, expected_gradient)


def clipped_by_old_rule(
    group: str, call: str, objective: PolicyObjective, samples: SequenceBatch
) -> SequenceBatch:
    """Tokens by the covariance with the current log-probs, which the old losses took.

    Ours take those before the update.
    """
    current = replace(
        samples, columns={**samples.columns, "old_logprobs": logprobs_of(group, call)}
    )
    return replace(samples, columns={**samples.columns, **objective.prepare(current, seed=0)})


@pytest.mark.parametrize("call", calls("policy_loss_kl_cov"))
def test_kl_cov_agrees_when_it_is_reported_the_current_log_probs_for_the_covariance(
    call: str,
) -> None:
    group = "policy_loss_kl_cov"
    case, samples = case_of(group, call)[0], samples_for(group, call)
    chosen = case["config"].get("policy_loss", {})
    objective = PolicyObjective(
        loss=KlCov(
            fraction=chosen.get("kl_cov_ratio", 2e-4), kl_cov_coef=chosen.get("ppo_kl_coef", 0.1)
        ),
        uses_correction_weights=CORRECTION_WEIGHTS in samples.columns,
        aggregation=MODES[case["loss_agg_mode"]],
    )
    loss, gradient = computed(
        objective, clipped_by_old_rule(group, call, objective, samples), logprobs_of(group, call)
    )
    assert_close(loss, old(group, f"{call}.loss"))
    assert_close(gradient, old(group, f"{call}.grad_log_prob"))


@pytest.mark.parametrize(
    "call",
    [call for call in calls("policy_loss_clip_cov") if call not in ("default_cov", "random_pick")],
)
def test_clip_cov_has_the_old_gradient_when_it_is_reported_the_current_log_probs_for_the_covariance(
    call: str,
) -> None:
    group = "policy_loss_clip_cov"
    case, samples = case_of(group, call)[0], samples_for(group, call)
    chosen = case["config"].get("policy_loss", {})
    objective = PolicyObjective(
        loss=ClipCov(
            **clips(case),
            fraction=chosen.get("clip_cov_ratio", 2e-4),
            min_covariance=chosen.get("clip_cov_lb", 1.0),
            max_covariance=chosen.get("clip_cov_ub", 5.0),
        ),
        uses_correction_weights=CORRECTION_WEIGHTS in samples.columns,
        aggregation=MODES[case["loss_agg_mode"]],
    )
    bounded = clipped_by_old_rule(group, call, objective, samples)
    loss, gradient = computed(objective, bounded, logprobs_of(group, call))
    assert_close(gradient, old(group, f"{call}.grad_log_prob"))
    # A token that PPO's clip holds already may be chosen here and not there: its gradient is 0 in
    # both, its loss 0 here alone.
    assert float(bounded.columns[IS_SELECTED].sum()) > 0
    if call == "on_policy":
        assert_close(loss, old(group, f"{call}.loss"))


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize("call", calls("policy_loss_dppo_tv"))
def test_dppo_agrees(call: str, divergence: Literal["tv", "kl"]) -> None:
    group = f"policy_loss_dppo_{divergence}"
    case, samples = case_of(group, call)[0], samples_for(group, call)
    objective = PolicyObjective(
        loss=Dppo(
            divergence=divergence, max_ratio=case["config"].get("clip_ratio_c", 3.0), **clips(case)
        ),
        uses_correction_weights=CORRECTION_WEIGHTS in samples.columns,
        aggregation=MODES[case["loss_agg_mode"]],
    )
    loss, gradient = computed(objective, samples, logprobs_of(group, call))
    assert_close(loss, old(group, f"{call}.loss"), tolerance=1e-5)
    assert_close(gradient, old(group, f"{call}.grad_log_prob"), tolerance=1e-5)


@pytest.mark.parametrize(
    "call", [call for call in core_calls("v0.7.1", "adv_grpo_passk") if "singleton" not in call]
)
def test_passk_agrees(call: str) -> None:
    case, mask = case_of("adv_grpo_passk", call)
    scores, samples = (
        column(case["token_level_rewards"]).sum(1),
        samples_of(mask, uid=case["index"]),
    )
    estimator = GrpoPassk(scale_by_std=case["config"]["norm_adv_by_std_in_grpo"])
    result = estimate_advantages(
        AlgorithmConfig(advantage=estimator, group_size=2), samples=samples, rewards=scores
    )
    assert_close(
        grid(result.advantages), old("adv_grpo_passk", f"{call}.advantages") * mask, tolerance=1e-5
    )


TOKEN_BASELINE = [
    call
    for call in core_calls("v0.7.1", "adv_tir_optimal_token_baseline")
    if "is_False|zero_tail_True" in call
]


@pytest.mark.parametrize("call", TOKEN_BASELINE)
def test_the_optimal_token_baseline_agrees_with_equal_energies_but_for_groups_of_one(
    call: str,
) -> None:
    group = "adv_tir_optimal_token_baseline"
    case, mask = case_of(group, call)
    energies = 1 - 2 * column(case["old_log_probs"]).exp() + column(case["sum_pi_squared"])
    samples = samples_of(
        mask,
        uid=case["index"],
        energies=energies,
        rewards=column(case["token_level_rewards"]) * mask,
    )
    result = compute_optimal_token_baseline_advantages(
        samples.columns["rewards"], energies=samples.columns["energies"], samples=samples
    )
    is_single = torch.bincount(samples.group_ids)[samples.group_ids] == 1
    assert_close(
        grid(result)[~is_single],
        (old(group, f"{call}.advantages") * mask)[~is_single],
        tolerance=1e-5,
    )
    assert bool((result.reshape(len(mask), -1)[is_single] == 0).all())


@pytest.mark.parametrize("call", core_calls("v0.7.1", "adv_opo"))
def test_opo_agrees_but_for_groups_of_one(call: str) -> None:
    case, mask = case_of("adv_opo", call)
    scores, samples = (
        column(case["token_level_rewards"]).sum(1),
        samples_of(mask, uid=case["index"]),
    )
    result = grid(
        estimate_advantages(
            AlgorithmConfig(advantage=Opo(), group_size=2), samples=samples, rewards=scores
        ).advantages
    )
    expected = old("adv_opo", f"{call}.advantages") * mask
    is_single = torch.bincount(samples.group_ids)[samples.group_ids] == 1
    assert_close(result[~is_single], expected[~is_single])
    assert bool((result[is_single] == 0).all())
    assert_close(expected[is_single], scores[is_single, None] * mask[is_single])


@pytest.mark.parametrize("call", core_calls("v0.7.1", "adv_gpg"))
def test_gpg_agrees_but_for_what_counts_as_teaching_and_groups_of_one(call: str) -> None:
    case, mask = case_of("adv_gpg", call)
    scores, samples = (
        column(case["token_level_rewards"]).sum(1),
        samples_of(mask, uid=case["index"]),
    )
    result = grid(
        estimate_advantages(
            AlgorithmConfig(advantage=Gpg(), group_size=2), samples=samples, rewards=scores
        ).advantages
    )
    expected = old("adv_gpg", f"{call}.advantages") * mask
    groups = [scores[samples.group_ids == group] for group in samples.group_ids.unique()]
    alive = sum(len(group) for group in groups if float(group.max() - group.min()) > 0)
    # There the scale is B over the number of scores that are not 0, here over the completions of
    # groups that are not all equal.
    ratio = alive / int(torch.count_nonzero(scores))
    is_single = torch.bincount(samples.group_ids)[samples.group_ids] == 1
    assert_close(result[~is_single] * ratio, expected[~is_single], tolerance=1e-5)
    assert bool((result[is_single] == 0).all())


@pytest.mark.parametrize("call", core_calls("v0.7.1", "adv_remax"))
def test_remax_agrees_but_for_rewards_before_the_last_token(call: str) -> None:
    case, mask = case_of("adv_remax", call)
    rewards, baselines = column(case["token_level_rewards"]), column(case["reward_baselines"])
    config = AlgorithmConfig(advantage=ReMax(), group_size=2)
    result = grid(
        estimate_advantages(
            config, samples=samples_of(mask), rewards=rewards.sum(1), baselines=baselines
        ).advantages
    )
    expected = old("adv_remax", f"{call}.advantages") * mask
    if (
        "dense" in call
    ):  # there a token has the rewards from itself on, here a completion has one reward
        rest = (rewards * mask).flip(1).cumsum(1).flip(1) - baselines[:, None]
        assert_close(rest * mask, expected, tolerance=1e-5)
        assert not torch.allclose(result, expected, atol=1e-2)
    else:
        assert_close(result, expected)


@pytest.mark.parametrize(
    "call", [c for c in core_calls("v0.7.1", "adv_gdpo") if c.endswith("norm_std_True")]
)
def test_gdpo_agrees_but_for_a_group_of_one_which_moves_the_mean_and_deviation_of_all(
    call: str,
) -> None:
    case, mask = case_of("adv_gdpo", call)
    given = json_of(GOLDEN / "inputs" / "core_inputs_nontensor.json")[case["non_tensor_batch"]]
    keys = case["config"]["gdpo_reward_keys"]
    weights = case["config"]["gdpo_reward_weights"] or [1.0] * len(keys)
    components = torch.tensor([given[key] for key in keys], dtype=torch.float64).T  # type: ignore[index]
    samples = samples_of(mask, uid=case["index"])
    is_single = torch.bincount(samples.group_ids)[samples.group_ids] == 1
    total = torch.zeros(len(mask), dtype=torch.float64)
    for k, weight in enumerate(weights):
        config = AlgorithmConfig(advantage=Grpo(), group_size=2)
        single = grid(
            estimate_advantages(config, samples=samples, rewards=components[:, k]).advantages
        ).double()
        of_group = (single * mask).sum(1) / mask.sum(1)
        total += weight * torch.where(is_single, components[:, k] / (1 + 1e-6), of_group)
    expected = old("adv_gdpo", f"{call}.advantages") * mask
    assert_close(whitened(total[:, None] * mask, mask).float() * mask, expected, tolerance=1e-4)
    config = AlgorithmConfig(advantage=Gdpo(), group_size=2)
    result = estimate_advantages(
        config,
        samples=samples,
        rewards=components.sum(1).float(),
        components=components,
        component_weights=tuple(weights),
    )
    # Ours is the same formula with 0 for the lone completion, whitened by the deviation over n.
    target = whitened(torch.where(is_single, 0.0, total)[:, None] * mask, mask).float() * mask
    assert_close(unbiased(grid(result.advantages), mask), target, tolerance=1e-4)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Whiten by the mean and the deviation over n - 1 of the trained tokens."""
    trained = values[mask.bool()]
    return (values - trained.mean()) / (trained.std() + 1e-8)


IMPORTANCE = [
    c
    for c in core_calls("v0.7.1", "rollout_correction")
    if c.startswith(("is_token|th", "is_sequence|th"))
]


@pytest.mark.parametrize("call", [call for call in IMPORTANCE if "_" not in call.split("|")[1]])
def test_importance_weights_agree_but_for_the_mean_that_normalises_those_of_completions(
    call: str,
) -> None:
    case, mask = case_of("rollout_correction", call)
    samples = samples_of(
        mask, old=column(case["old_log_prob"]), rollout=column(case["rollout_log_prob"])
    )
    weights_class = {"token": TokenWeights, "sequence": SequenceWeights}[case["rollout_is"]]
    config = weights_class(
        truncate_at=case["rollout_is_threshold"],
        self_normalize=case["rollout_is_batch_normalize"],
    )
    result = compute_rollout_correction(
        config,
        samples=samples,
        old_logprobs=samples.columns["old"],
        rollout_logprobs=samples.columns["rollout"],
    )
    weights, expected = (
        grid(result.weights) * mask,
        tensors_of(CORE / "rollout_correction" / "outputs.safetensors"),
    )
    required = expected[f"{call}.rollout_is_weights"] * mask
    if case["rollout_is"] == "sequence" and case["rollout_is_batch_normalize"]:
        # Ours average 1 over the trained tokens, the old ones over the completions that train.
        assert float(weights.sum() / mask.sum()) == pytest.approx(1.0, rel=1e-5)
        trains = mask.sum(1) > 0
        assert float((required[trains].sum(1) / mask[trains].sum(1)).mean()) == pytest.approx(
            1.0, rel=1e-5
        )
        assert_close(weights / weights.sum(), required / required.sum(), tolerance=1e-5)
    else:
        assert_close(weights, required, tolerance=1e-5)
