"""Compare values and gradients with functions of other projects, on random data of five seeds.

A row of `COMPARISONS` names a project and a function that returns a pair of results for the data of
one seed: ours, and that of the project. To compare a new loss, add a row.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tools.peers import openrlhf_adapters, slime_adapters, verl_adapters
from tools.peers.correction_comparisons import list_correction_rows
from tools.peers.estimator_comparisons import (
    NEMO_ESTIMATORS,
    SKYRL,
    list_estimator_rows,
    stub_skyrl,
)
from tools.peers.loss_comparisons import list_loss_rows
from tools.peers.nemo_comparisons import NEMO, list_nemo_rows, load_nemo
from tools.peers.random_data import Data, Pair, Row, make_kinds, stretch_ratios
from tools.peers.trl_comparisons import TRL, list_trl_rows, load_trl
from tools.peers.trl_policy_comparisons import list_trl_policy_rows

NUM_SEEDS = 5
TOLERANCE = 2e-5
"""Largest accepted difference, relative to the largest number of the other project.

It allows for float32 sums of a few hundred terms in another order.
"""

_MIN_LOSS = 0.01
"""Differences of a smaller loss are relative to this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A function that other projects have, too."""

    project: str
    name: str
    compute: Callable[[Any, Data], Pair]
    """Called with the project's module."""
    module: str
    """Import path of the project's module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """Largest differences of a comparison over all seeds, relative to the largest number."""

    project: str
    name: str
    value: float
    gradient: float | None
    """None if the function has no gradient."""

    @property
    def agrees(self) -> bool:
        """True if both differ only by float rounding."""
        return self.value <= TOLERANCE and (self.gradient or 0.0) <= TOLERANCE


def measure(comparison: Comparison, module: Any) -> ComparisonResult:
    """Compare all kinds of data of all seeds."""
    values, gradients = [], []
    for data in (kind for seed in range(NUM_SEEDS) for kind in make_kinds(seed)):
        local, remote = comparison.compute(module, data)
        values.append(_measure_difference(local.detach(), remote.detach()))
        if remote.requires_grad:
            (gradient,) = torch.autograd.grad(local.sum(), data.logprobs, retain_graph=True)
            (other,) = torch.autograd.grad(remote.sum(), data.logprobs)
            gradients.append(_measure_difference(gradient, other))
    return ComparisonResult(
        project=comparison.project,
        name=comparison.name,
        value=max(values),
        gradient=max(gradients) if gradients else None,
    )


def _measure_difference(local: Tensor, remote: Tensor) -> float:
    scale = float(remote.abs().max())
    if remote.numel() == 1:
        # A loss near 0 is a sum of terms near 1 that cancel, and has the rounding of these.
        scale = max(scale, _MIN_LOSS)
    return float((local - remote).abs().max()) / (scale or 1.0)


def _verl_ppo(mode: str, *, is_weighted: bool = False) -> Callable[[Any, Data], Pair]:
    def compute(module: Any, data: Data) -> Pair:
        config = importlib.import_module("verl.workers.config.actor").ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2
        )
        weights = (data.old - data.rollout).exp().clamp(max=2.0) if is_weighted else None

        def call(function: Callable[..., tuple[Tensor, object]]) -> Tensor:
            loss, _ = function(
                old_log_prob=data.old,
                log_prob=data.logprobs,
                advantages=data.advantages,
                response_mask=data.mask,
                loss_agg_mode=mode,
                config=config,
                rollout_is_weights=weights,
            )
            return loss

        return call(verl_adapters.compute_policy_loss_vanilla), call(
            module.compute_policy_loss_vanilla
        )

    return compute


def _verl_value(mode: str) -> Callable[[Any, Data], Pair]:
    def compute(module: Any, data: Data) -> Pair:
        arguments = (data.logprobs, data.advantages, data.values, data.mask, 0.5, mode)
        local, _ = verl_adapters.compute_value_loss(*arguments)
        remote, _ = module.compute_value_loss(*arguments)
        return local, remote

    return compute


def _verl_groups(name: str, **arguments: object) -> Callable[[Any, Data], Pair]:
    def compute(module: Any, data: Data) -> Pair:
        import numpy as np

        given: dict[str, Any] = {
            "token_level_rewards": data.token_rewards,
            "response_mask": data.mask,
            "index": np.array(data.groups),
            **arguments,
        }
        # The empty row has no reward, in verl too.
        return getattr(verl_adapters, name)(**given)[0], getattr(module, name)(**given)[0]

    return compute


def _verl_returns(module: Any, data: Data) -> Pair:
    arguments = (data.token_rewards, data.values, data.mask, 0.97, 0.9)
    _, local = verl_adapters.compute_gae_advantage_return(*arguments)
    _, remote = module.compute_gae_advantage_return(*arguments)
    return local, remote * data.mask


def _verl_kl(name: str) -> Callable[[Any, Data], Pair]:
    return lambda module, data: (
        verl_adapters.kl_penalty(data.logprobs, data.ref, name),
        module.kl_penalty(data.logprobs, data.ref, name),
    )


def _slime_losses(name: str, **arguments: float) -> Callable[[Any, Data], Pair]:
    def compute(module: Any, data: Data) -> Pair:
        logprobs, old = data.logprobs.reshape(-1), data.old.reshape(-1)
        given: dict[str, Any] = {
            "ppo_kl": old - logprobs,
            "advantages": data.advantages.reshape(-1),
            **arguments,
        }
        if name == "compute_cispo_loss":
            given["log_probs"] = logprobs
        return getattr(slime_adapters, name)(**given)[0], getattr(module, name)(**given)[0]

    return compute


def _openrlhf_policy(
    *, has_row_advantages: bool = False, **arguments: Any
) -> Callable[[Any, Data], Pair]:
    """Compare the policy loss, on request with one advantage per row.

    With advantages that differ within a row, our GSPO is GSPO-token, which has another gradient.
    """

    def compute(module: Any, data: Data) -> Pair:
        advantages = data.advantages
        if has_row_advantages:
            advantages = advantages[:, :1].expand_as(advantages)

        def call(policy_loss: Callable[..., Any]) -> Tensor:
            loss: Tensor = policy_loss(**arguments)(
                data.logprobs,
                data.old,
                advantages,
                action_mask=data.mask,
                rollout_log_probs=data.rollout,
                # Without the count OpenRLHF divides by all rows, also the empty one.
                global_batch_size=float((data.mask.sum(dim=1) > 0).sum()),
            )[0]
            return loss

        return call(openrlhf_adapters.PolicyLoss), call(module.PolicyLoss)

    return compute


_VERL, _SLIME = "verl.trainer.ppo.core_algos", "slime.utils.ppo_utils"
_OPENRLHF = "openrlhf.models.loss"
_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def _list_verl_rows() -> list[Row]:
    return [
        *(("verl", _VERL, f"ppo, dual clip, {mode}", _verl_ppo(mode)) for mode in _MODES),
        ("verl", _VERL, "ppo with correction weights", _verl_ppo("token-mean", is_weighted=True)),
        *(("verl", _VERL, f"value loss, {mode}", _verl_value(mode)) for mode in _MODES),
        ("verl", _VERL, "grpo", _verl_groups("compute_grpo_outcome_advantage")),
        (
            *("verl", _VERL, "dr_grpo"),
            _verl_groups("compute_grpo_outcome_advantage", norm_adv_by_std_in_grpo=False),
        ),
        ("verl", _VERL, "rloo", _verl_groups("compute_rloo_outcome_advantage")),
        ("verl", _VERL, "gae, returns", _verl_returns),
        *(("verl", _VERL, f"kl {name}", _verl_kl(name)) for name in ("k1", "k2", "k3", "k3+")),
    ]


def _list_other_rows() -> list[Row]:
    """Return the rows of slime and OpenRLHF."""
    return [
        (
            *("slime", _SLIME, "ppo, dual clip"),
            _slime_losses("compute_policy_loss", eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0),
        ),
        (
            *("slime", _SLIME, "cispo"),
            _slime_losses("compute_cispo_loss", eps_clip=1.0, eps_clip_high=0.28),
        ),
        ("openrlhf", _OPENRLHF, "ppo, dual clip", _openrlhf_policy(dual_clip=3.0)),
        (
            *("openrlhf", _OPENRLHF, "gspo"),
            _openrlhf_policy(
                has_row_advantages=True,
                policy_loss_type="gspo",
                clip_eps_low=0.03,
                clip_eps_high=0.04,
            ),
        ),
        *(
            (
                *("openrlhf", _OPENRLHF, f"ppo with {kind}"),
                _openrlhf_policy(
                    enable_vllm_is_correction=True,
                    vllm_is_correction_type=kind,
                    vllm_is_truncated_threshold=[low, 1.2],
                ),
            )
            for kind, low in {"tis": 0.0, "icepop": 0.8, "seq-mask-tis": 0.9}.items()
        ),
    ]


_EXTREME = {
    *(f"ppo, dual clip, {mode}" for mode in _MODES),
    *("ppo with correction weights", "cispo", "sapo"),
}
"""Losses of verl that are also compared at log-ratios from -81 to 66, which both sides clamp."""


def _stretch(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of `_EXTREME` for data with such ratios."""

    def compute_at_extremes(compute: Callable[[Any, Data], Pair]) -> Callable[[Any, Data], Pair]:
        return lambda module, data: compute(module, stretch_ratios(data))

    return [
        (project, module, f"{name}, extreme ratios", compute_at_extremes(compute))
        for project, module, name, compute in rows
        if project == "verl" and name in _EXTREME
    ]


PROJECTS = ("verl", "skyrl", "slime", "openrlhf", "nemo", "trl")
"""Projects with comparisons, in the order of the table."""

COMPARISONS = sorted(
    (
        Comparison(project=project, module=module, name=name, compute=compute)
        for project, module, name, compute in (
            *_list_verl_rows(),
            *_stretch([*_list_verl_rows(), *list_loss_rows()]),
            *list_correction_rows(),
            *_list_other_rows(),
            *list_loss_rows(),
            *list_estimator_rows(),
            *list_nemo_rows(),
            *list_trl_rows(),
            *list_trl_policy_rows(),
        )
    ),
    key=lambda comparison: PROJECTS.index(comparison.project),
)


def compare_all(checkouts: Mapping[str, Path]) -> list[ComparisonResult]:
    """Run the comparisons with the projects that are checked out."""
    results = []
    for comparison in COMPARISONS:
        if comparison.project in checkouts:
            module = _import(comparison.module, checkouts[comparison.project])
            results.append(measure(comparison, module))
    return results


def _import(name: str, checkout: Path) -> Any:
    if name == _OPENRLHF:
        return _load_openrlhf(checkout)
    if name in (NEMO, NEMO_ESTIMATORS):
        return load_nemo(checkout, name)
    if name == SKYRL:
        stub_skyrl()
    if name == TRL:
        return load_trl(checkout)
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    return importlib.import_module(name)


def _load_openrlhf(checkout: Path) -> Any:
    """Load two files without their package, which needs DeepSpeed and CUDA."""
    folder, package = checkout / "openrlhf" / "models", "_openrlhf_models"
    if f"{package}.loss" not in sys.modules:
        sys.modules.setdefault("deepspeed", MagicMock())
        parent = types.ModuleType(package)
        parent.__path__ = [str(folder)]
        sys.modules[package] = parent
    return importlib.import_module(f"{package}.loss")


def format_comparisons(results: Sequence[ComparisonResult]) -> str:
    """Return the table of the largest differences."""
    lines = ["| project | function | value | gradient |", "|---|---|---|---|"]
    for each in results:
        gradient = "" if each.gradient is None else f"{each.gradient:.1e}"
        mark = "" if each.agrees else " **differs**"
        lines.append(f"| {each.project} | {each.name}{mark} | {each.value:.1e} | {gradient} |")
    return "\n".join(lines)
