"""Comparisons of weights, rules of rejection and metrics of the sampler's log-probs with verl."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from temper_trainer.algorithms.importance_weights import compute_rollout_correction
from temper_trainer.config.rollout_correction import SequenceWeights, TokenWeights
from tools.peers import verl_adapters
from tools.peers.padded import build_batch, flatten, unflatten
from tools.peers.random_data import Data, Pair, Row

_MODULE = "verl.trainer.ppo.rollout_corr_helper"
_THRESHOLDS: dict[str, str | float] = {
    "token_k1": "0.8_1.3",
    "token_k2": 0.05,
    "token_k3": 0.05,
    "seq_sum_k1": "0.6_1.4",
    "seq_mean_k1": "0.9_1.1",
    "seq_mean_k2": 0.04,
    "seq_mean_k3": 0.04,
    "seq_max_k2": 0.1,
    "seq_max_k3": 0.1,
}
"""Bounds by verl's option of rollout_rs."""
_CHAINS = ("token_k1,seq_mean_k3", "seq_sum_k1,seq_max_k2", "token_k2,seq_mean_k1,seq_max_k3")
"""Several rules at once."""


def _call(function: Callable[..., Any], data: Data, **arguments: object) -> Any:
    return function(
        old_log_prob=data.old,
        rollout_log_prob=data.rollout,
        response_mask=data.mask,
        **arguments,
    )


def _correct(module: Any, data: Data, **arguments: object) -> tuple[Any, Tensor, dict[str, float]]:
    """Return verl's weights, mask and metrics."""
    function = module.compute_rollout_correction_and_rejection_mask
    weights, mask, metrics = _call(function, data, **arguments)
    return weights, mask, metrics


def _compare_weights(**arguments: object) -> Callable[[Any, Data], Pair]:
    def compute(module: Any, data: Data) -> Pair:
        local, remote = (
            _correct(each, data, **arguments)[0].batch["rollout_is_weights"] * data.mask
            for each in (verl_adapters, module)
        )
        return local, remote

    return compute


def _compare_masks(options: str) -> Callable[[Any, Data], Pair]:
    thresholds = ",".join(str(_THRESHOLDS[option]) for option in options.split(","))

    def compute(module: Any, data: Data) -> Pair:
        arguments = {"rollout_rs": options, "rollout_rs_threshold": thresholds}
        local, remote = (_correct(each, data, **arguments)[1] for each in (verl_adapters, module))
        return local, remote

    return compute


def _compare_both(level: str, options: str) -> Callable[[Any, Data], Pair]:
    """Compare the weights of one correction with its rules; verl has weights and a mask."""
    given = {option: _THRESHOLDS[option] for option in options.split(",")}

    def compute(module: Any, data: Data) -> Pair:
        correction = (TokenWeights if level == "token" else SequenceWeights)(
            truncate_at=1.5,
            reject=dict(verl_adapters.translate_rule(*each) for each in given.items()),
        )
        local = compute_rollout_correction(
            correction,
            samples=build_batch(data.mask),
            old_logprobs=flatten(data.old),
            rollout_logprobs=flatten(data.rollout),
        ).weights
        weights, mask, _ = _correct(
            module,
            data,
            rollout_is=level,
            rollout_is_threshold=1.5,
            rollout_rs=options,
            rollout_rs_threshold=",".join(map(str, given.values())),
        )
        return unflatten(local, data.mask) * data.mask, weights.batch["rollout_is_weights"] * mask

    return compute


def _compare_effective_sample_size(level: str) -> Callable[[Any, Data], Pair]:
    def compute(module: Any, data: Data) -> Pair:
        arguments = {"rollout_is": level, "rollout_is_threshold": 1.5}
        local, remote = (
            torch.tensor(
                _correct(each, data, **arguments)[2]["rollout_corr/rollout_is_eff_sample_size"]
            )
            for each in (verl_adapters, module)
        )
        return local, remote

    return compute


def _compare_kl_metric(module: Any, data: Data) -> Pair:
    local, remote = (
        torch.tensor(_call(each.compute_offpolicy_metrics, data)["k3_kl"])
        for each in (verl_adapters, module)
    )
    return local, remote


def list_correction_rows() -> list[Row]:
    """Return the rows of verl's rollout correction."""
    levels = ("token", "sequence")
    rows: dict[str, Callable[[Any, Data], Pair]] = {
        f"truncated weights, {level}": _compare_weights(rollout_is=level, rollout_is_threshold=2.0)
        for level in levels
    }
    rows["normalized weights, token"] = _compare_weights(
        rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=True
    )
    rows["icepop weights"] = _compare_weights(rollout_is="token", rollout_is_threshold="0.8_1.2")
    rows |= {
        f"rejection by {options}": _compare_masks(options) for options in (*_THRESHOLDS, *_CHAINS)
    }
    rows |= {
        f"{level} weights, rejection by {options}": _compare_both(level, options)
        for level, options in itertools.product(levels, (*_THRESHOLDS, *_CHAINS))
    }
    rows |= {
        f"effective sample size of {level} weights": _compare_effective_sample_size(level)
        for level in levels
    }
    rows["k3 estimate of KL(sampler, trainer)"] = _compare_kl_metric
    return [("verl", _MODULE, name, compute) for name, compute in rows.items()]
