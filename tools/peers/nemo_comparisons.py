"""Comparisons with the policy loss of NeMo-RL, `ClippedPGLossFn`.

NeMo-RL's own tests of it need a GPU, so only its numbers are compared.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from temper_engine_api.objective import HeadOutput
from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
from temper_trainer.algorithms.policy_losses.clipped_losses import Cispo
from tools.peers import openrlhf_adapters
from tools.peers.padded import compute_loss
from tools.peers.random_data import Data, Pair, Row

NEMO = "nemo_rl.algorithms.loss.loss_functions"
_STUBS = (
    "nemo_rl.algorithms.x_token.loss_utils",
    "nemo_rl.data.chat_templates",
    "nemo_rl.distributed.batched_data_dict",
    "nemo_rl.distributed.model_utils",
    "nemo_rl.models.dtensor.parallelize",
    "nemo_rl.models.policy",
    "nemo_rl.utils.fastokens",
    "nemo_rl.utils.logger",
)
"""Modules that the loss's module imports for other losses, and that need Ray or CUDA."""


def load_nemo(checkout: Path, module: str) -> Any:
    """Load a module of algorithms without the packages around it, which need Ray and CUDA."""
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss"):
        if name not in sys.modules:
            package = types.ModuleType(name)
            package.__path__ = [str(checkout.joinpath(*name.split(".")))]
            sys.modules[name] = package
    for name in _STUBS:
        sys.modules.setdefault(name, MagicMock())
    losses = importlib.import_module(NEMO)
    # The estimators import this class from the package, which is empty here.
    vars(sys.modules["nemo_rl.algorithms.loss"]).setdefault(
        "ClippedPGLossConfig", losses.ClippedPGLossConfig
    )
    return importlib.import_module(module)


def _compute_nemo_loss(module: Any, data: Data, advantages: Tensor, **settings: object) -> Tensor:
    """Return NeMo-RL's loss without a KL; its columns have a prompt token in front."""
    config = module.ClippedPGLossConfig(reference_policy_kl_penalty=0.0, **settings)
    is_trained = data.mask.any(dim=1)

    def add_prompt(column: Tensor) -> Tensor:
        return torch.nn.functional.pad(column, (1, 0))

    loss, _ = module.ClippedPGLossFn(config)(
        data.logprobs,
        {
            "token_mask": add_prompt(data.mask),
            "sample_mask": is_trained.float(),
            "advantages": add_prompt(advantages),
            "prev_logprobs": add_prompt(data.old),
            "generation_logprobs": add_prompt(data.rollout),
        },
        is_trained.sum(),
        data.mask.sum(),
    )
    assert isinstance(loss, Tensor)
    return loss


def _compare(
    settings: dict[str, object], *, has_row_advantages: bool = False, **arguments: Any
) -> Callable[[Any, Data], Pair]:
    """Compare our loss with these arguments of the adapter with NeMo-RL's with these settings.

    Args:
        settings: Fields of `ClippedPGLossConfig`.
        has_row_advantages: True for one advantage per row. With advantages that differ within a
            row, our GSPO is GSPO-token, which has another gradient.
        arguments: Fields of `openrlhf_adapters.PolicyLoss`.
    """

    def compute(module: Any, data: Data) -> Pair:
        advantages = data.advantages
        if has_row_advantages:
            advantages = advantages[:, :1].expand_as(advantages)
        local = openrlhf_adapters.PolicyLoss(**arguments)(
            data.logprobs,
            data.old,
            advantages,
            action_mask=data.mask,
            rollout_log_probs=data.rollout,
            global_batch_size=float(data.mask.any(dim=1).sum()),
        )[0]
        return local, _compute_nemo_loss(module, data, advantages, **settings)

    return compute


def _compare_cispo(module: Any, data: Data) -> Pair:
    local = compute_loss(
        PolicyObjective(loss=Cispo(clip_high=0.28)),
        mask=data.mask,
        output=(HeadOutput.LOGPROB, data.logprobs),
        columns={"advantages": data.advantages, "old_logprobs": data.old},
    )
    remote = _compute_nemo_loss(
        module, data, data.advantages, use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=0.28
    )
    return local, remote


def list_nemo_rows() -> list[Row]:
    """Return the rows of NeMo-RL."""
    rows = {
        "ppo": _compare({}),
        "ppo, dual clip": _compare({"ratio_clip_c": 3.0}, dual_clip=3.0),
        "ppo, mean over sequences": _compare({"token_level_loss": False}, token_level_loss=False),
        "cispo": _compare_cispo,
        "gspo": _compare(
            {
                "token_level_loss": False,
                "sequence_level_importance_ratios": True,
                "ratio_clip_min": 0.03,
                "ratio_clip_max": 0.04,
            },
            has_row_advantages=True,
            policy_loss_type="gspo",
            clip_eps_low=0.03,
            clip_eps_high=0.04,
        ),
        **{
            f"ppo with {kind}": _compare(
                {
                    "use_importance_sampling_correction": True,
                    "truncated_importance_sampling_type": kind,
                    "truncated_importance_sampling_ratio": 1.2,
                    "truncated_importance_sampling_ratio_min": low,
                },
                enable_vllm_is_correction=True,
                vllm_is_correction_type=kind,
                vllm_is_truncated_threshold=[low, 1.2],
            )
            for kind, low in {"tis": 0.0, "icepop": 0.8, "seq-mask-tis": 0.9}.items()
        },
    }
    return [("nemo", NEMO, f"ClippedPGLossFn: {name}", row) for name, row in rows.items()]
