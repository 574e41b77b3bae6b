import re
from pathlib import Path

import pytest
import torch
from golden_traces import (
    GOLDEN,
    assert_close,
    assert_numbers,
    core_calls,
    core_inputs,
    json_of,
    needs_golden,
    tensors_of,
)
from torch import Tensor

from temper_engine_api.errors import ConfigError
from temper_legacy_shim.numerics.masked_losses import aggregate, kl_penalty, value_loss
from temper_legacy_shim.numerics.policy_losses import (
    PolicyInputs,
    PolicyLossSettings,
    mismatch,
    policy_loss,
)
from temper_legacy_shim.workers.batches.settings import policy_loss_settings

pytestmark = needs_golden
VERSION = "v0.7.1"
CORE = GOLDEN / f"core_{VERSION}"
MODES = (
    "vanilla",
    "gspo",
    "sapo",
    "gpg",
    "cispo",
    "geo_mean",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
    "bypass_mode",
)
# The deprecated actor never filled global_batch_info, which belongs to the engines that came after
# it.
POLICY_CALLS = [
    (mode, call)
    for mode in MODES
    for call in core_calls(VERSION, f"policy_loss_{mode}")
    if not call.startswith("global_batch_info")
]


def column(name: object) -> Tensor:
    return core_inputs()[str(name)]


@pytest.mark.parametrize(("mode", "call"), POLICY_CALLS)
def test_policy_losses_gradients_and_metrics_are_the_old_ones(mode: str, call: str) -> None:
    case = json_of(CORE / f"policy_loss_{mode}" / "case.json")["calls"][call]  # type: ignore[index]
    expected = json_of(CORE / f"policy_loss_{mode}" / "metrics.json")[call]
    config = dict(case["config"])
    settings = policy_loss_settings(
        {**config, "policy_loss": {"loss_mode": mode, **config.get("policy_loss", {})}}
    )
    logprobs = column(case["log_prob"]).clone().requires_grad_()
    weights = None if case["rollout_is_weights"] is None else column(case["rollout_is_weights"])
    torch.manual_seed(case["seed"])
    inputs = PolicyInputs(
        logprobs=logprobs,
        old_logprobs=column(case["old_log_prob"]),
        advantages=column(case["advantages"]),
        mask=column(case["response_mask"]),
        weights=weights,
        agg_mode=case["loss_agg_mode"],
    )
    assert isinstance(expected, dict)
    if "__error__" in expected:
        with pytest.raises((ValueError, TypeError, AssertionError)):
            policy_loss(mode)(inputs, settings)
        return
    loss, metrics = policy_loss(mode)(inputs, settings)
    loss.backward()
    outputs = tensors_of(CORE / f"policy_loss_{mode}" / "outputs.safetensors")
    assert_close(loss.detach(), outputs[f"{call}.loss"])
    assert logprobs.grad is not None
    assert_close(logprobs.grad, outputs[f"{call}.grad_log_prob"])
    assert_numbers({"loss": float(loss.detach()), **metrics}, expected)
    assert isinstance(settings, PolicyLossSettings)


@pytest.mark.parametrize(
    "call", [c for c in core_calls(VERSION, "agg_loss") if c.endswith("|local")]
)
def test_aggregation_is_the_old_one(call: str) -> None:
    case = json_of(CORE / "agg_loss" / "case.json")["calls"][call]  # type: ignore[index]
    rows = slice(6, 7) if "row6_only" in call else slice(None)
    mask = column(case["loss_mask"].partition("[")[0])[rows]
    if call.startswith("bogus"):
        with pytest.raises(ConfigError, match="loss_agg_mode is 'bogus', but must be one of"):
            aggregate(column("advantages")[rows], mask, "bogus")
        return
    loss = (column("advantages") * column("old_log_prob"))[rows].clone().requires_grad_()
    total = aggregate(loss, mask, case["loss_agg_mode"])
    total.backward()
    outputs = tensors_of(CORE / "agg_loss" / "outputs.safetensors")
    assert_close(total.detach(), outputs[f"{call}.loss"])
    assert loss.grad is not None
    assert_close(loss.grad, outputs[f"{call}.grad_loss_mat"])


@pytest.mark.parametrize(
    "call", [c for c in core_calls(VERSION, "value_loss") if c.endswith("|local")]
)
def test_the_value_loss_is_the_old_one(call: str) -> None:
    case = json_of(CORE / "value_loss" / "case.json")["calls"][call]  # type: ignore[index]
    values = column(case["vpreds"]).clone().requires_grad_()
    loss, metrics = value_loss(
        values,
        returns=column(case["returns"]),
        old_values=column(case["values"]),
        mask=column(case["response_mask"]),
        cliprange=case["cliprange_value"],
        agg_mode=case["loss_agg_mode"],
    )
    loss.backward()
    outputs = tensors_of(CORE / "value_loss" / "outputs.safetensors")
    assert_close(loss.detach(), outputs[f"{call}.loss"])
    assert values.grad is not None
    assert_close(values.grad, outputs[f"{call}.grad_vpreds"])
    assert metrics["critic/vf_clipfrac"] == pytest.approx(
        json_of(CORE / "value_loss" / "metrics.json")[call]["vf_clipfrac"]
    )  # type: ignore[index]


@pytest.mark.parametrize("call", core_calls(VERSION, "kl_penalty"))
def test_kl_penalties_are_the_old_ones(call: str) -> None:
    kind = json_of(CORE / "kl_penalty" / "case.json")["calls"][call]["kl_penalty"]  # type: ignore[index]
    expected = json_of(CORE / "kl_penalty" / "metrics.json").get(call, {})
    logprobs = column("log_prob").clone().requires_grad_()
    if "__error__" in expected:  # type: ignore[operator]
        with pytest.raises((NotImplementedError, ValueError)):
            kl_penalty(logprobs, column("ref_log_prob"), kind=kind)
        return
    kl = kl_penalty(logprobs, column("ref_log_prob"), kind=kind)
    (kl * column("response_mask")).sum().backward()
    outputs = tensors_of(CORE / "kl_penalty" / "outputs.safetensors")
    assert_close(kl.detach(), outputs[f"{call}.kl"])
    assert logprobs.grad is not None
    assert_close(
        logprobs.grad, next(outputs[name] for name in outputs if name.startswith(f"{call}.grad"))
    )


FIRST = "policy_loss_deprecated_compute_policy_loss"


@pytest.mark.parametrize("call", core_calls(VERSION, FIRST))
def test_the_first_policy_loss_is_vanilla_under_another_signature(call: str) -> None:
    case = json_of(CORE / FIRST / "case.json")["calls"][call]  # type: ignore[index]
    settings = policy_loss_settings(
        {
            "clip_ratio": case["cliprange"],
            "clip_ratio_low": case["cliprange_low"],
            "clip_ratio_high": case["cliprange_high"],
            "clip_ratio_c": case["clip_ratio_c"],
        }
    )
    logprobs = column("log_prob").clone().requires_grad_()
    inputs = PolicyInputs(
        logprobs=logprobs,
        old_logprobs=column("old_log_prob"),
        advantages=column("advantages"),
        mask=column("response_mask"),
        weights=None,
        agg_mode=case["loss_agg_mode"],
    )
    loss, _ = policy_loss("vanilla")(inputs, settings)
    loss.backward()
    outputs = tensors_of(CORE / FIRST / "outputs.safetensors")
    assert_close(loss.detach(), outputs[f"{call}.loss"])
    assert logprobs.grad is not None
    assert_close(logprobs.grad, outputs[f"{call}.grad_log_prob"])


FROM_LOGPROBS = "rollout_corr_metrics_from_logprobs"


@pytest.mark.parametrize("call", core_calls(VERSION, FROM_LOGPROBS))
def test_distances_from_the_sampler_are_the_old_ones(call: str) -> None:
    case = json_of(CORE / FROM_LOGPROBS / "case.json")["calls"][call]  # type: ignore[index]
    expected = json_of(CORE / FROM_LOGPROBS / "metrics.json")[call]
    assert isinstance(expected, dict)
    result = mismatch(
        column(case["log_prob"]),
        rollout_logprobs=column(case["rollout_log_prob"]),
        mask=column(case["response_mask"]),
    )
    assert_numbers(result, expected)


def test_every_group_of_traces_has_a_row_in_the_page() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/migration/workers.md").read_text()
    table = page.partition("### Every group of the traces")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row[1])}
    assert all(len(row[2].strip()) > 3 for row in rows)
    assert named == {
        path.name
        for version in ("v0.7.1", "v0.9.0")
        for path in (GOLDEN / f"core_{version}").iterdir()
    }
