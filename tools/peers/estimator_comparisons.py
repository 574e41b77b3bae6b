"""Comparisons of estimators and of the mean over prompts with verl, NeMo-RL and SkyRL."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

from temper_trainer.algorithms.advantages.estimators.group_estimators import (
    compute_gdpo_advantages,
    compute_reinforce_plus_plus_baseline_advantages,
)
from temper_trainer.algorithms.advantages.estimators.token_estimators import (
    compute_gae,
    compute_length_adaptive_lambdas,
)
from tools.peers import skyrl_adapters, verl_adapters
from tools.peers.padded import build_batch, flatten, unflatten
from tools.peers.random_data import Data, Pair, Row
from tools.peers.suites import SUITES

_VERL = "verl.trainer.ppo.core_algos"
NEMO_ESTIMATORS = "nemo_rl.algorithms.advantage_estimator"
SKYRL = "skyrl.backends.skyrl_train.utils.ppo_utils"
_GAMMA = 0.97


def stub_skyrl() -> None:
    """Put stubs in place of the modules that SkyRL imports for environments and backends."""
    for name in SUITES["skyrl"].stubs:
        sys.modules.setdefault(name, MagicMock())


def _undo_bessel(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return whitened advantages as verl has them, whose variance divides by N - 1."""
    num_tokens = mask.sum()
    return advantages * ((num_tokens - 1) / num_tokens).sqrt()


def _compare_reinforce_plus_plus(module: Any, data: Data) -> Pair:
    arguments = (data.token_rewards, data.mask, Namespace(gamma=_GAMMA))
    local, _ = verl_adapters.compute_reinforce_plus_plus_outcome_advantage(*arguments)
    remote, _ = module.compute_reinforce_plus_plus_outcome_advantage(*arguments)
    return _undo_bessel(local, data.mask), remote


def _compare_reinforce_plus_plus_baseline(module: Any, data: Data) -> Pair:
    batch = build_batch(data.mask, group_ids=data.groups)
    local = compute_reinforce_plus_plus_baseline_advantages(
        data.token_rewards.sum(-1), samples=batch
    )
    remote, _ = module.compute_reinforce_plus_plus_baseline_outcome_advantage(
        data.token_rewards, data.mask, np.array(data.groups)
    )
    return _undo_bessel(unflatten(local, data.mask), data.mask), remote


def _compare_gdpo(module: Any, data: Data) -> Pair:
    components, weights = torch.stack([data.rewards, data.rewards.flip(0)], dim=1), (1.0, 0.5)
    num_rows, length = data.mask.shape
    local = compute_gdpo_advantages(
        components,
        weights=weights,
        penalty=torch.zeros(num_rows),
        samples=build_batch(data.mask, group_ids=data.groups),
    )
    remote, _ = module.compute_gdpo_outcome_advantage(
        data.token_rewards,
        data.mask,
        np.array(data.groups),
        config={"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": weights},
        non_tensor_batch=dict(zip(("first", "second"), components.T.numpy(), strict=True)),
        # verl reads from these where a row ends, and puts the row's rewards there.
        batch={
            "prompts": torch.zeros(num_rows, 1),
            "attention_mask": torch.ones(num_rows, 1 + length, dtype=torch.long),
        },
    )
    return _undo_bessel(unflatten(local, data.mask), data.mask), remote


def _compare_nemo_gae(*, length_factor: float | None) -> Callable[[Any, Data], Pair]:
    """Compare advantages and returns of GAE with two lambdas; with a factor the first is VAPO's."""

    def compute(module: Any, data: Data) -> Pair:
        batch = build_batch(data.mask)
        local = compute_gae(
            flatten(data.token_rewards),
            values=flatten(data.values),
            samples=batch,
            gamma=_GAMMA,
            gae_lambda=0.9
            if length_factor is None
            else compute_length_adaptive_lambdas(batch, length_factor=length_factor),
            value_lambda=0.95,
        )
        estimator = module.GeneralizedAdvantageEstimator(
            {
                "gae_lambda": 0.5,  # not used, because both of the others are given
                "gae_lambda_policy": 0.9,
                "gae_lambda_value": 0.95,
                "gae_gamma": _GAMMA,
                "length_adaptive_alpha": length_factor or 0,
                "normalize_advantages": False,
            },
            Namespace(
                use_kl_in_reward=False,
                reference_policy_kl_penalty=0.0,
                reference_policy_kl_type="k3",
            ),
        )
        remote = estimator.compute_advantage(None, data.rewards, data.mask, data.values)
        return (
            torch.stack([unflatten(each, data.mask) for each in local]),
            # NeMo-RL's return of an untrained token is its value.
            torch.stack([each * data.mask for each in remote]),
        )

    return compute


def _compare_maxrl(module: Any, data: Data) -> Pair:
    arguments = (data.token_rewards, data.mask, data.groups)
    local, _ = skyrl_adapters.compute_maxrl_advantage(*arguments)
    remote, _ = module.compute_maxrl_advantage(*arguments)
    return local, remote


def _compare_prompt_mean(module: Any, data: Data) -> Pair:
    """Compare the losses of tokens, scaled such that their sum is the mean over prompts."""
    boundaries = [
        (data.groups.index(group), data.groups.index(group) + data.groups.count(group))
        for group in dict.fromkeys(data.groups)
    ]
    arguments = (data.advantages, data.mask, "prompt_mean", 1, data.mask.shape[1], boundaries)
    name = "apply_loss_reduction_to_advantages_minibatch"
    local, remote = (getattr(each, name)(*arguments) for each in (skyrl_adapters, module))
    return local * data.mask, remote * data.mask


def list_estimator_rows() -> list[Row]:
    """Return the rows of this file."""
    return [
        ("verl", _VERL, "reinforce_plus_plus", _compare_reinforce_plus_plus),
        ("verl", _VERL, "reinforce_plus_plus_baseline", _compare_reinforce_plus_plus_baseline),
        ("verl", _VERL, "gdpo", _compare_gdpo),
        (
            *("nemo", NEMO_ESTIMATORS, "gae and returns with another lambda"),
            _compare_nemo_gae(length_factor=None),
        ),
        ("nemo", NEMO_ESTIMATORS, "vapo and its returns", _compare_nemo_gae(length_factor=0.3)),
        ("skyrl", SKYRL, "maxrl", _compare_maxrl),
        ("skyrl", SKYRL, "prompt_mean", _compare_prompt_mean),
    ]
