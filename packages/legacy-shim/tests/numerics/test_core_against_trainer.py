"""The old algorithms' traces against the trainer's algorithms.

Equal, or different in the way that docs/migration/workers.md says.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_traces import (
    GOLDEN,
    assert_close,
    core_calls,
    core_inputs,
    json_of,
    needs_golden,
    tensors_of,
)
from torch import Tensor

from temper_engine_api.batch import Denominators, SequenceBatch, from_sequences
from temper_engine_api.objective import (
    Aggregation,
    AggregationMode,
    HeadOutput,
    HeadOutputs,
    LossTerms,
)
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.adaptive_coefficients import KlController
from temper_trainer.algorithms.advantages.advantage_statistics import whiten
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.algorithms.advantages.estimators.token_estimators import (
    compute_gae,
    compute_reinforce_plus_plus_advantages,
)
from temper_trainer.algorithms.advantages.step_advantages import estimate_advantages
from temper_trainer.algorithms.kl import estimate_kl, estimate_kl_loss
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.objectives.value_loss import ValueObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.settings.variants import list_variants

pytestmark = needs_golden
CORE = GOLDEN / "core_v0.7.1"
WIDTH = 16
MODES = {
    "token-mean": Aggregation(),
    "seq-mean-token-sum": Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_SUM),
    "seq-mean-token-mean": Aggregation(mode=AggregationMode.SEQUENCE_MEAN_TOKEN_MEAN),
    "seq-mean-token-sum-norm": Aggregation(
        mode=AggregationMode.SEQUENCE_MEAN_TOKEN_SUM_NORM, horizon=WIDTH
    ),
}


def column(name: object) -> Tensor:
    return core_inputs()[str(name)]


def samples_of(mask: Tensor, *, uid: str | None = None, **columns: Tensor) -> SequenceBatch:
    """Return the rows of the traces as sequences.

    One token of prompt, and the response's whole padded width.
    """
    rows = range(len(mask))
    names = (
        json_of(GOLDEN / "inputs" / "core_inputs_nontensor.json")["uid"][uid] if uid else list(rows)
    )  # type: ignore[index]
    return from_sequences(
        [torch.zeros(WIDTH + 1, dtype=torch.int64) for _ in rows],
        loss_masks=[torch.cat([torch.tensor([False]), mask[row].bool()]) for row in rows],
        group_ids=[sorted(set(names)).index(name) for name in names],
        columns={
            name: [torch.cat([torch.zeros(1), values[row].float()]) for row in rows]
            for name, values in columns.items()
        },
    )


def grid(values: Tensor) -> Tensor:
    return values.reshape(-1, WIDTH + 1)[:, 1:].float()


def case_of(group: str, call: str) -> tuple[dict[str, Any], Tensor]:
    case: dict[str, Any] = json_of(CORE / group / "case.json")["calls"][call]  # type: ignore[index]
    return case, column(case.get("response_mask", "response_mask"))


def old(group: str, name: str) -> Tensor:
    return tensors_of(CORE / group / "outputs.safetensors")[name]


def unbiased(values: Tensor, mask: Tensor) -> Tensor:
    """Return the whitened by a deviation over n, as by one over n - 1, which is the old one."""
    count = float(mask.sum())
    return values * math.sqrt((count - 1) / count)


GROUP_CALLS = [
    (group, call)
    for group in (
        "adv_grpo",
        "adv_grpo_vectorized",
        "adv_rloo",
        "adv_rloo_vectorized",
        "adv_reinforce_plus_plus_baseline",
    )
    for call in core_calls("v0.7.1", group)
]


@pytest.mark.parametrize(("group", "call"), GROUP_CALLS)
def test_group_estimators_agree_but_for_groups_of_one(group: str, call: str) -> None:
    case, mask = case_of(group, call)
    scores = column(case["token_level_rewards"]).sum(1)
    name = {"adv_reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline"}.get(
        group, "rloo" if "rloo" in group else "grpo"
    )
    if case.get("norm_adv_by_std_in_grpo") is False:
        name = "dr_grpo"
    samples = samples_of(mask, uid=case["index"])
    config = AlgorithmConfig(advantage=list_variants(AdvantageEstimator)[name](), group_size=2)
    result = grid(estimate_advantages(config, samples=samples, rewards=scores).advantages)
    expected = old(group, f"{call}.advantages") * mask
    sizes = torch.bincount(samples.group_ids)[samples.group_ids]
    if name == "reinforce_plus_plus_baseline":
        if bool((sizes == 1).any()):
            # The old estimator leaves the score of a lone completion as it is, and that moves the
            # mean and deviation of all.
            assert not torch.allclose(result[sizes > 1], expected[sizes > 1], atol=1e-3)
            return
        result = unbiased(result, mask)
    compared = (
        torch.ones_like(sizes, dtype=torch.bool) if group == "adv_rloo_vectorized" else sizes > 1
    )
    assert_close(result[compared], expected[compared], tolerance=3e-5)
    if not bool(compared.all()):
        # A group of one has nothing to be compared with: 0 here, the bare score there.
        assert bool((result[~compared] == 0).all())
        assert_close(
            expected[~compared].sum(1) / mask[~compared].sum(1), scores[~compared], tolerance=1e-4
        )


@pytest.mark.parametrize("call", core_calls("v0.7.1", "adv_gae"))
def test_gae_agrees_but_for_the_deviation_that_whitens(call: str) -> None:
    case, mask = case_of("adv_gae", call)
    samples = samples_of(
        mask, rewards=column(case["token_level_rewards"]), values=column(case["values"])
    )
    advantages, returns = compute_gae(
        samples.columns["rewards"],
        values=samples.columns["values"],
        samples=samples,
        gamma=case["gamma"],
        gae_lambda=case["lam"],
    )
    assert_close(grid(returns) * mask, old("adv_gae", f"{call}.returns") * mask, tolerance=3e-5)
    whitened = unbiased(grid(whiten(advantages, mask=samples.loss_mask)), mask)
    assert_close(whitened * mask, old("adv_gae", f"{call}.advantages") * mask, tolerance=3e-5)


@pytest.mark.parametrize("version", ["v0.7.1", "v0.9.0"])
@pytest.mark.parametrize("call", core_calls("v0.7.1", "adv_reinforce_plus_plus"))
def test_reinforce_plus_plus_agrees_but_for_the_deviation_and_in_the_older_release_for_holes(
    call: str, version: str
) -> None:
    case, mask = case_of("adv_reinforce_plus_plus", call)
    samples = samples_of(mask, rewards=column(case["token_level_rewards"]) * mask)
    result = (
        unbiased(
            grid(
                compute_reinforce_plus_plus_advantages(
                    samples.columns["rewards"], samples=samples, gamma=case["config"]["gamma"]
                )
            ),
            mask,
        )
        * mask
    )
    expected = (
        tensors_of(GOLDEN / f"core_{version}" / "adv_reinforce_plus_plus" / "outputs.safetensors")[
            f"{call}.advantages"
        ]
        * mask
    )
    if "holes" in call and version == "v0.7.1":
        assert not torch.allclose(
            result, expected, atol=1e-3
        )  # a reward did not reach the tokens before a hole
    elif "holes" in call and "dense" in call:
        pass  # rewards that lie on untrained tokens: the old code adds them, Temper has none there
    else:
        assert_close(result, expected, tolerance=3e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "mask_name", ["response_mask", "response_mask_holes", "response_mask_emptyrow"]
)
def test_aggregation_over_a_full_mini_batch_agrees(mode: str, mask_name: str) -> None:
    samples = samples_of(column(mask_name), loss=column("advantages") * column("old_log_prob"))
    terms = LossTerms(loss=samples.columns["loss"])
    result = reduce_loss(
        terms, samples, denominators=count_denominators(samples), aggregation=MODES[mode]
    )
    assert_close(result, old("agg_loss", f"{mode}|{mask_name}|local.loss"))
    if mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        # Given the full mini-batch's counts, the old code multiplies by the ranks, whose mean it
        # takes later; here ranks add up.
        full = Denominators(tokens=150, sequences=16, groups=16)
        part = reduce_loss(terms, samples, denominators=full, aggregation=MODES[mode])
        assert_close(2 * part, old("agg_loss", f"{mode}|{mask_name}|global.loss"))


@pytest.mark.parametrize(
    "call",
    [
        c
        for c in core_calls("v0.7.1", "policy_loss_vanilla")
        if not c.startswith("global_batch_info") and c != "rollout_is_weights"
    ],
)
def test_the_clipped_policy_loss_and_its_gradient_agree(call: str) -> None:
    case, mask = case_of("policy_loss_vanilla", call)
    config = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
        **case["config"],
    }
    low, high = (
        config["clip_ratio"] if config[name] is None else config[name]
        for name in ("clip_ratio_low", "clip_ratio_high")
    )
    objective = PolicyObjective(
        loss=Ppo(clip_low=low, clip_high=high, dual_clip=config["clip_ratio_c"]),
        aggregation=MODES[case["loss_agg_mode"]],
    )
    samples = samples_of(
        mask, advantages=column(case["advantages"]), old_logprobs=column(case["old_log_prob"])
    )
    logprobs = samples_of(mask, x=column(case["log_prob"])).columns["x"].clone().requires_grad_()
    terms = objective(HeadOutputs(columns={HeadOutput.LOGPROB: logprobs}), samples)
    loss = reduce_loss(
        terms, samples, denominators=count_denominators(samples), aggregation=objective.aggregation
    )
    loss.backward()
    assert_close(loss.detach(), old("policy_loss_vanilla", f"{call}.loss"))
    assert logprobs.grad is not None
    assert_close(grid(logprobs.grad), old("policy_loss_vanilla", f"{call}.grad_log_prob"))


@pytest.mark.parametrize(
    "call",
    [
        c
        for c in core_calls("v0.7.1", "value_loss")
        if c.endswith("|local") and c.split("|")[0] in MODES
    ],
)
def test_the_value_loss_agrees(call: str) -> None:
    case, mask = case_of("value_loss", call)
    samples = samples_of(mask, returns=column(case["returns"]), values=column(case["values"]))
    values = samples_of(mask, x=column(case["vpreds"])).columns["x"]
    objective = ValueObjective(
        clip=case["cliprange_value"], aggregation=MODES[case["loss_agg_mode"]]
    )
    terms = objective(HeadOutputs(columns={HeadOutput.VALUE: values}), samples)
    loss = reduce_loss(
        terms, samples, denominators=count_denominators(samples), aggregation=objective.aggregation
    )
    assert_close(loss, old("value_loss", f"{call}.loss"))


@pytest.mark.parametrize(("estimator", "name"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_estimators_agree(estimator: str, name: str) -> None:
    result = estimate_kl(
        column("log_prob"), ref_logprobs=column("ref_log_prob"), estimator=estimator
    )  # type: ignore[arg-type]
    expected = old("kl_penalty", f"{name}.kl")
    # Log-ratios beyond 20 are held here for every estimator, there for the third alone, which is
    # also held to 10.
    is_moderate = (column("log_prob") - column("ref_log_prob")).abs() < 2
    assert int((~is_moderate).sum()) == 2
    assert_close(result[is_moderate], expected[is_moderate], tolerance=1e-5)


@pytest.mark.parametrize("name", ["kl+", "k1+", "k2+", "mse+", "low_var_kl+", "k3+", "low_var_kl"])
def test_kl_losses_agree_in_value_and_gradient(name: str) -> None:
    result = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}[
        name.removesuffix("+")
    ]
    if name.endswith("+") and result != "k2":
        result += "+"
    leaf, ref = column("log_prob").clone().requires_grad_(), column("ref_log_prob")
    # The bound that a translation writes for every estimator that contains k3.
    clamp = 10.0 if result.startswith("k3") else None
    kl = estimate_kl_loss(
        leaf, ref_logprobs=ref, log_ratio=torch.zeros_like(ref), estimator=result, clamp=clamp
    )  # type: ignore[arg-type]
    (kl * column("response_mask")).sum().backward()
    traces = tensors_of(GOLDEN / "core_v0.9.0" / "kl_penalty" / "outputs.safetensors")
    # Log-ratios beyond 20 are clamped for k1 and k2 too, which had no clamp in the old code.
    is_compared = (
        (leaf.detach() - ref).abs() < 20
        if result != "k3"
        else torch.ones_like(ref, dtype=torch.bool)
    )
    assert int(is_compared.sum()) >= ref.numel() - 2
    assert_close(kl.detach()[is_compared], traces[f"{name}.kl"][is_compared], tolerance=1e-5)
    assert leaf.grad is not None
    assert_close(
        leaf.grad[is_compared], traces[f"{name}.grad_log_prob"][is_compared], tolerance=1e-5
    )


@pytest.mark.parametrize(
    "mask_name", ["response_mask", "response_mask_holes", "response_mask_emptyrow"]
)
def test_the_sum_over_tokens_agrees(mask_name: str) -> None:
    samples = samples_of(column(mask_name), loss=column("advantages") * column("old_log_prob"))
    aggregation = Aggregation(mode=AggregationMode.TOKEN_SUM)
    terms = LossTerms(loss=samples.columns["loss"])
    result = reduce_loss(
        terms, samples, denominators=count_denominators(samples), aggregation=aggregation
    )
    traces = tensors_of(GOLDEN / "core_v0.9.0" / "agg_loss" / "outputs.safetensors")
    assert_close(result, traces[f"token-sum|{mask_name}|local.loss"])


@pytest.mark.parametrize(
    "call",
    [
        c
        for c in core_calls("v0.7.1", "kl_controllers")
        if c.startswith("adaptive") and c != "adaptive_h0"
    ],
)
def test_the_adaptive_kl_controller_agrees(call: str) -> None:
    case, _ = case_of("kl_controllers", call)
    given = case["kl_ctrl"]
    controller = KlController(
        coef=given["kl_coef"], target=given["target_kl"], horizon=given["horizon"]
    )
    result = [controller.coef]
    for kl in case["current_kl"]:
        controller = controller.adapt(kl=kl, num_samples=case["n_steps"])
        result.append(controller.coef)
    assert replace(controller).coef == pytest.approx(result[-1])
    assert result == pytest.approx(json_of(CORE / "kl_controllers" / "metrics.json")[call]["value"])  # type: ignore[index]
