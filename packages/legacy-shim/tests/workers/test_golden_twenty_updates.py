"""Compare twenty updates of the deprecated actor with the formulas in plain torch.

The formulas first reproduce the traces of the genuine class.

The traces hold two updates. The plain loop below (transformers' model with eager attention, torch's
AdamW, the losses written out) begins with their weights and batch and must leave their losses,
gradients, norms and parameters; then it continues by the same formulas, the same batch again, for
eighteen updates more, and the worker that ``use_legacy_worker_impl=enable`` trains through must
draw the same curve.

Tolerances: on parameters after two updates those of test_golden_workers; curves agreed to 5e-6
where this was written, and may differ by 1e-4, since an entry whose gradient is zero up to rounding
moves as it likes. Temper's own numerics differ by a hundred times that at once.
"""

import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from golden_traces import GOLDEN, json_of, needs_golden, tensors_of
from safetensors.torch import load_file
from torch import Tensor

from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.deprecation import LegacyWorkerWarning
from temper_legacy_shim.workers import ActorRolloutRefWorker

pytestmark = needs_golden
CASES = ("actor/entropy/tied_fsdp2_ws1", "actor/entropy_and_kl/untied_fsdp2_ws1")
"""Cases whose gradients do not vanish if every ratio is clipped."""
TRACE, PARAMETER, STRAYS, STRAY_LIMIT, CURVE = 2e-5, 1e-5, 2, 5e-4, 1e-4
NUM_CALLS = 10
"""Number of calls with two updates each: a batch of 8 rows in mini-batches of 4, in micro-batches
of 2.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Reported numbers of a run: one entry per call, two for norms."""

    losses: list[float] = field(default_factory=list)
    """``actor/pg_loss``: sums over a call, entropy's part included."""
    kl_losses: list[float] = field(default_factory=list)
    """``actor/kl_loss``."""
    norms: list[float] = field(default_factory=list)
    """Gradient norms before clipping."""


def load_model(case_folder: Path) -> Any:
    case: dict[str, Any] = json_of(case_folder / "case.json")
    folder = case_folder / case["model_files"]
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.load_state_dict(load_file(next(folder.glob("*.safetensors"))), strict=False)
    model.tie_weights()
    return model.eval()


class PlainActor:
    """The old actor's arithmetic, as the traces' README and the papers say it."""

    def __init__(self, case_folder: Path) -> None:
        case: dict[str, Any] = json_of(case_folder / "case.json")
        self.config = case["config"]
        inputs = tensors_of((case_folder / case["inputs"]).resolve())
        self.batch = {key: inputs[name] for key, name in case["batch_keys"].items()}
        self.model = load_model(case_folder)
        optim = self.config["optim"]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim["lr"],
            betas=tuple(optim["betas"]),
            weight_decay=optim["weight_decay"],
        )
        self.first_gradients: dict[str, Tensor] = {}
        self.curve = Curve()

    def call(self) -> None:
        """Call ``update_policy`` once with both mini-batches."""
        loss = kl_loss = 0.0
        for rows in torch.arange(8).split(4):
            self.optimizer.zero_grad()
            for micro in rows.split(2):
                policy, kl = self._losses(micro)
                # Two micro-batches share an update, whatever the number of their tokens.
                ((policy + self.config["kl_loss_coef"] * kl) / 2).backward()
                loss, kl_loss = loss + policy.item() / 2, kl_loss + kl.item() / 2
            if not self.first_gradients:
                self.first_gradients = {
                    name: p.grad.clone() for name, p in self.model.named_parameters()
                }
            self.curve.norms.append(
                torch.nn.utils.clip_grad_norm_(
                    self.model.parameters(), self.config["grad_clip"]
                ).item()
            )
            self.optimizer.step()
        self.curve.losses.append(loss)
        self.curve.kl_losses.append(kl_loss)

    def _losses(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clipped policy loss without entropy and the KL, as micro-batch means."""
        batch = {name: column[rows] for name, column in self.batch.items()}
        mask, width = batch["response_mask"].bool(), batch["responses"].shape[1]
        passed = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        log_p = self.model(**passed).logits[:, -width - 1 : -1].log_softmax(-1)
        own = log_p.gather(-1, batch["responses"][..., None])[..., 0]
        ratio, advantages = (own - batch["old_log_probs"]).exp(), batch["advantages"]
        worse = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = torch.where(
            advantages < 0, torch.minimum(-advantages * self.config["clip_ratio_c"], worse), worse
        )[mask].mean()
        loss = loss - self.config["entropy_coeff"] * -(log_p.exp() * log_p).sum(-1)[mask].mean()
        if not self.config["use_kl_loss"]:
            return loss, torch.zeros(())
        above = batch["ref_log_prob"] - own
        return loss, (above.exp() - above - 1).clamp(-10, 10)[mask].mean()


def run_worker(case_folder: Path, folder: Path, *, numerics: str = "legacy") -> Curve:
    """Return the same calls through the deprecated class."""
    case: dict[str, Any] = json_of(case_folder / "case.json")
    model_folder = case_folder / case["model_files"]
    folder.mkdir()
    shutil.copy(model_folder / "config.json", folder)
    shutil.copy(next(model_folder.glob("*.safetensors")), folder / "model.safetensors")
    inputs = tensors_of((case_folder / case["inputs"]).resolve())
    own = case["config"]
    optim = {name: own["optim"][name] for name in ("lr", "betas", "weight_decay")}
    names = (
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "grad_clip",
        "clip_ratio_c",
        "entropy_coeff",
        "use_kl_loss",
        "kl_loss_coef",
    )
    sizes = {
        name: own[name]
        for name in (
            *names,
            "clip_ratio",
            "clip_ratio_low",
            "clip_ratio_high",
            "kl_loss_type",
            "loss_agg_mode",
            "strategy",
        )
    }
    config = {
        "model": {"path": str(folder), "use_remove_padding": False},
        "actor": {
            **sizes,
            "optim": optim,
            "fsdp_config": {
                "dtype": "float32",
                "mixed_precision": {"param_dtype": "fp32"},
                "fsdp_size": -1,
            },
        },
        "rollout": {"n": 1, "temperature": 1.0},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LegacyWorkerWarning)
        worker = ActorRolloutRefWorker(config, "actor", numerics=numerics)
    worker.init_model()
    curve = Curve()
    try:
        for _ in range(NUM_CALLS):
            data = DataProto.from_dict(
                tensors={key: inputs[name] for key, name in case["batch_keys"].items()},
                meta_info=case["meta_info"],
            )
            metrics: Any = worker.update_actor(data).meta_info["metrics"]
            curve.losses.append(metrics["actor/pg_loss"])
            curve.kl_losses.append(metrics["actor/kl_loss"])
            curve.norms.extend(metrics["actor/grad_norm"])
    finally:
        assert worker.actor is not None
        worker.actor.engine.close()
    return curve


@pytest.mark.parametrize("name", CASES)
def test_the_plain_formulas_leave_what_the_genuine_class_left(name: str) -> None:
    plain = PlainActor(GOLDEN / name)
    plain.call()
    traced: Any = json_of(GOLDEN / name / "metrics.json")
    traced = traced["per_rank"][0]
    assert plain.curve.losses == [pytest.approx(traced["actor/pg_loss"], rel=TRACE)]
    assert plain.curve.kl_losses == [pytest.approx(traced["actor/kl_loss"], rel=TRACE)]
    assert plain.curve.norms == pytest.approx(traced["actor/grad_norm"], rel=TRACE)
    left = tensors_of(GOLDEN / name / "outputs.safetensors")
    for key, parameter in plain.model.named_parameters():
        gradient, distance = left[f"grad0.{key}"], (parameter.detach() - left[f"param.{key}"]).abs()
        assert float((plain.first_gradients[key] - gradient).norm()) <= PARAMETER * float(
            gradient.norm()
        ), key
        assert int((distance > PARAMETER).sum()) <= STRAYS, key
        assert float(distance.max()) <= STRAY_LIMIT, key


@pytest.mark.parametrize("name", CASES)
def test_over_twenty_updates_the_worker_draws_the_curve_of_the_old_formulas(
    name: str, tmp_path: Path
) -> None:
    plain = PlainActor(GOLDEN / name)
    for _ in range(NUM_CALLS):
        plain.call()
    worker = run_worker(GOLDEN / name, tmp_path / "legacy")
    assert len(worker.norms) == 2 * NUM_CALLS
    assert worker.losses == pytest.approx(plain.curve.losses, rel=CURVE)
    assert worker.kl_losses == pytest.approx(plain.curve.kl_losses, rel=CURVE)
    assert worker.norms == pytest.approx(plain.curve.norms, rel=CURVE)


def test_tempers_own_numerics_are_another_curve_from_the_first_update_on(tmp_path: Path) -> None:
    plain = PlainActor(GOLDEN / CASES[0])
    plain.call()
    norms = run_worker(GOLDEN / CASES[0], tmp_path / "temper", numerics="temper").norms
    assert norms[0] != pytest.approx(plain.curve.norms[0], rel=100 * CURVE)
