"""Comparisons with TRL, from single functions of its files.

Importing TRL would need the libraries of all its trainers, so functions and methods are compiled
without the imports of their files. Methods get an object with the settings that they read.
"""

from __future__ import annotations
import __future__ as future

import ast
import contextlib
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from temper_engine_api.objective import HeadOutput
from temper_trainer.algorithms.distillation_losses.top_k_losses import (
    ForwardKl,
    JensenShannon,
    TopKLoss,
    TopKReverseKl,
)
from temper_trainer.algorithms.objectives.supervised_losses import (
    RewardModelObjective,
    SftObjective,
)
from temper_trainer.algorithms.preference_losses.preference_loss import PreferenceLoss
from temper_trainer.algorithms.preference_losses.reference_free_losses import Orpo, SimPo
from temper_trainer.algorithms.preference_losses.reference_losses import Dpo, Hinge
from temper_trainer.algorithms.preference_losses.unpaired_losses import Kto
from temper_trainer.algorithms.sft_losses import CrossEntropy, Dft, SftLoss
from tools.peers.padded import compute_loss
from tools.peers.preference_rows import (
    NUM_ROWS,
    compute_preference_loss,
    compute_reward_loss,
    select_preferences,
)
from tools.peers.random_data import Data, Pair, Row

TRL = "trl"
"""Stands for the functions of `load_trl` in a row, in place of an import path."""

_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "trl/experimental/server_distillation/server_distillation_trainer.py": (
        "_jsd_divergence",
        "_add_tail_bucket",
    ),
    "trl/trainer/utils.py": ("selective_log_softmax", "entropy_from_logits", "nanmin", "nanmax"),
    "trl/trainer/sft_trainer.py": ("dft_loss", "_chunk", "_chunked_cross_entropy_loss"),
    "trl/experimental/cpo/cpo_trainer.py": ("cpo_loss",),
    "trl/experimental/orpo/orpo_trainer.py": ("log1mexp", "odds_ratio_loss"),
    "trl/trainer/dpo_trainer.py": ("_compute_loss",),
    "trl/trainer/kto_trainer.py": ("_compute_loss",),
    "trl/trainer/grpo_trainer.py": ("_compute_loss", "get_off_policy_mask"),
    "trl/trainer/reward_trainer.py": ("compute_loss",),
}
"""Functions and methods by file. The loss of NAME_trainer.py becomes ``NAME_loss``."""


def load_trl(checkout: Path) -> Any:
    """Return a module with the functions of `_FUNCTIONS`."""
    module = types.ModuleType(TRL)
    module.__dict__.update(
        torch=torch,
        nn=nn,
        F=nn.functional,
        # The weights of the head are not sharded here.
        maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext(),
    )
    for file, names in _FUNCTIONS.items():
        tree = ast.parse((checkout / file).read_text())
        definitions = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name in names
        ]
        assert {node.name for node in definitions} == set(names), f"{file} lacks one of {names}"
        for node in definitions:
            if node.name.endswith("compute_loss"):
                node.name = f"{Path(file).stem.removesuffix('_trainer')}_loss"
            node.decorator_list = []
        tree.body = list(definitions)
        # Annotations name classes whose imports are left out.
        flags = future.annotations.compiler_flag
        exec(compile(tree, str(checkout / file), "exec", flags=flags), module.__dict__)
    return module


def _make_logits(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs [B, L] of at most 0, and logits [B, L + 1, 2] that give token 0 these."""
    log_odds = nn.functional.pad(logprobs, (0, 1))
    logits = torch.stack([log_odds, torch.zeros_like(log_odds)], dim=-1)
    # The first column predicts the first label, so that the last column is not used.
    return nn.functional.logsigmoid(logprobs), logits


def _compare_divergence(loss: TopKLoss, *, beta: float) -> Callable[[Any, Data], Pair]:
    """Compare a divergence over the teacher's top-k tokens, with the rest as one more token."""

    def compute(module: Any, data: Data) -> Pair:
        # A vocabulary of the row's length: its tokens are the columns of the data.
        policy, teacher = data.logprobs.log_softmax(-1), data.ref.log_softmax(-1)
        top, ids = teacher.topk(loss.top_k, dim=-1)
        policy = policy.gather(-1, ids)
        support = torch.ones_like(top, dtype=torch.bool)
        policy_tail, is_counted = module._add_tail_bucket(policy, support)
        teacher_tail, _ = module._add_tail_bucket(top, support)
        remote = module._jsd_divergence(policy_tail, teacher_tail, beta, is_counted)
        return loss.measure(policy, teacher=top), remote.sum(-1)

    return compute


def _compare_sft(loss: SftLoss) -> Callable[[Any, Data], Pair]:
    """Compare a loss of demonstrations; TRL's own cross-entropy is that of ``chunked_nll``."""

    def compute(module: Any, data: Data) -> Pair:
        logprobs, logits = _make_logits(data.logprobs)
        output = (HeadOutput.LOGPROB, logprobs)
        local = compute_loss(SftObjective(loss=loss), mask=data.mask, output=output, columns={})
        labels = nn.functional.pad(torch.where(data.mask > 0, 0, -100), (1, 0), value=-100)
        if isinstance(loss, Dft):
            return local, module.dft_loss(SimpleNamespace(logits=logits), labels)
        # With the identity as the weight of the head, the hidden states are the logits.
        remote, *_ = module._chunked_cross_entropy_loss(logits, torch.eye(2), 5, labels)
        return local, remote

    return compute


def _average_pairs(data: Data, is_chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean log-prob of the tokens of each chosen and of each rejected row."""
    logprobs = nn.functional.logsigmoid(data.logprobs) * data.mask
    means = logprobs.sum(-1) / data.mask.sum(-1)
    return means[is_chosen], means[~is_chosen]


def _compare_simpo(module: Any, data: Data) -> Pair:
    selected, is_chosen = select_preferences(data)
    settings = SimpleNamespace(
        loss_type="simpo",
        beta=2.5,
        simpo_gamma=1.4,
        alpha=0.0,
        label_smoothing=0.0,
        accelerator=_ACCELERATOR,
    )
    losses, _, _ = module.cpo_loss(settings, *_average_pairs(selected, is_chosen))
    loss = SimPo(beta=2.5, gamma=1.4)
    return compute_preference_loss(loss, data=selected, is_chosen=is_chosen), losses.mean()


def _compare_hinge(module: Any, data: Data) -> Pair:
    selected, is_chosen = select_preferences(data)
    logprobs = (nn.functional.logsigmoid(selected.logprobs) * selected.mask).sum(-1)
    settings = SimpleNamespace(loss_type="hinge", beta=0.3, alpha=0.0, accelerator=_ACCELERATOR)
    losses, _, _ = module.cpo_loss(settings, logprobs[is_chosen], logprobs[~is_chosen])
    loss = Hinge(beta=0.3, reference="none")
    return compute_preference_loss(loss, data=selected, is_chosen=is_chosen), losses.mean()


def _compare_dpo(loss_type: str, loss: PreferenceLoss) -> Callable[[Any, Data], Pair]:
    """Compare a loss of pairs with that of ``DPOTrainer``."""

    def compute(module: Any, data: Data) -> Pair:
        selected, is_chosen = select_preferences(data)
        local = compute_preference_loss(loss, data=selected, is_chosen=is_chosen)
        # TRL's chosen rows are the first half.
        order = torch.cat([is_chosen.nonzero()[:, 0], (~is_chosen).nonzero()[:, 0]])
        _, logits = _make_logits(selected.logprobs[order])
        mask = nn.functional.pad(selected.mask[order], (1, 0))
        reference = (selected.ref * selected.mask).sum(-1)
        inputs = {
            "input_ids": torch.zeros_like(mask, dtype=torch.int64),
            "attention_mask": torch.ones_like(mask),
            "completion_mask": mask,
            "ref_chosen_logps": reference[is_chosen],
            "ref_rejected_logps": reference[~is_chosen],
        }
        settings = SimpleNamespace(
            model=SimpleNamespace(training=True),
            accelerator=_ACCELERATOR,
            aux_loss_enabled=False,
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[loss_type],
            loss_weights=[1.0],
            beta=0.3,
            use_weighting=False,
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
        )
        outputs = SimpleNamespace(logits=logits)
        return local, module.dpo_loss(settings, lambda **_: outputs, inputs, return_outputs=False)

    return compute


def _compare_orpo(module: Any, data: Data) -> Pair:
    """Compare ORPO with the likelihood of completions; TRL's also counts the tokens of prompts."""
    selected, is_chosen = select_preferences(data)
    chosen, rejected = _average_pairs(selected, is_chosen)
    settings = SimpleNamespace(beta=0.3, accelerator=_ACCELERATOR)
    losses, *_ = module.odds_ratio_loss(settings, chosen, rejected)
    local = compute_preference_loss(Orpo(beta=0.3), data=selected, is_chosen=is_chosen)
    return local, -(losses + chosen).mean()


def _compare_kto(module: Any, data: Data) -> Pair:
    selected, _ = select_preferences(data)
    is_desirable = torch.tensor([True, True, False, True, False, False])
    _, logits = _make_logits(selected.logprobs)
    mask = nn.functional.pad(selected.mask, (1, 0))
    baseline = torch.full((NUM_ROWS,), 0.4)
    settings = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=_ACCELERATOR,
        loss_type="kto",
        beta=0.7,
        desirable_weight=1.3,
        undesirable_weight=0.8,
        aux_loss_enabled=False,
        calculate_KL=True,
        precompute_ref_logps=True,
        _compute_kl_logps=lambda model, batch: baseline,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
    )
    inputs = {
        "input_ids": torch.zeros_like(mask, dtype=torch.int64),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": is_desirable,
        "ref_logps": (selected.ref * selected.mask).sum(-1),
        "ref_KL_logps": torch.zeros(NUM_ROWS),
    }
    outputs = SimpleNamespace(logits=logits)
    remote = module.kto_loss(settings, lambda **_: outputs, inputs, return_outputs=False)
    loss = Kto(beta=0.7, desirable_weight=1.3, undesirable_weight=0.8)
    local = compute_preference_loss(loss, data=selected, is_chosen=is_desirable, kl_baseline=0.4)
    return local, remote


_ACCELERATOR = SimpleNamespace(
    device="cpu", gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor
)
"""Stands for accelerate's, of one process."""


def _compare_centered_reward_model(module: Any, data: Data) -> Pair:
    """Compare the loss of a reward model; the score of a row is the sum of its log-probs."""
    selected, is_chosen = select_preferences(data)
    scores = (selected.logprobs * selected.mask).sum(-1)
    settings = SimpleNamespace(
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(center_rewards_coefficient=0.1),
        accelerator=SimpleNamespace(
            gather=lambda tensor: tensor, gather_for_metrics=lambda tensor: tensor
        ),
        _total_train_tokens=0,
        _metrics={"eval": defaultdict(list)},
    )
    # TRL's chosen rows are the first half.
    halves = SimpleNamespace(logits=torch.cat([scores[is_chosen], scores[~is_chosen]])[:, None])
    remote = module.reward_loss(settings, lambda **_: halves, {})
    return compute_reward_loss(scores, is_chosen, RewardModelObjective(center_coef=0.1)), remote


def list_trl_rows() -> list[Row]:
    """Return the rows of TRL."""
    return [
        *(
            (TRL, TRL, f"{loss.name} with tail, beta {beta}", _compare_divergence(loss, beta=beta))
            for loss, beta in (
                (ForwardKl(top_k=5), 0.0),
                (TopKReverseKl(top_k=5), 1.0),
                *((JensenShannon(top_k=5, mixture=each), each) for each in (0.1, 0.3, 0.5, 0.9)),
            )
        ),
        (TRL, TRL, "sft, chunked_nll", _compare_sft(CrossEntropy())),
        (TRL, TRL, "dft", _compare_sft(Dft())),
        (TRL, TRL, "DPOTrainer: sigmoid", _compare_dpo("sigmoid", Dpo(beta=0.3))),
        (
            *(TRL, TRL, "DPOTrainer: sigmoid_norm"),
            _compare_dpo("sigmoid_norm", Dpo(beta=0.3, length_normalized=True)),
        ),
        (TRL, TRL, "DPOTrainer: hinge", _compare_dpo("hinge", Hinge(beta=0.3))),
        (TRL, TRL, "hinge without a reference", _compare_hinge),
        (TRL, TRL, "simpo", _compare_simpo),
        (TRL, TRL, "orpo", _compare_orpo),
        (TRL, TRL, "kto", _compare_kto),
        (TRL, TRL, "reward model, centered", _compare_centered_reward_model),
    ]
