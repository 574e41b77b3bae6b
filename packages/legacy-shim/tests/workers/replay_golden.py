"""One rank that replays golden traces.

Python replay_golden.py OUT CASE..., with RANK and WORLD_SIZE set. Writes what it measured.
"""

import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.workers.ppo_actor import PPOActor
from temper_legacy_shim.workers.ppo_critic import PPOCritic


class GradientsOf:
    """Full gradients of the first update before clipping, from its first moments."""

    first: dict[str, Tensor] | None = None

    def keep(self, engine: FSDPEngine, norm: float) -> None:
        if self.first is None:
            spec = engine.config.optimizer
            assert spec is not None
            scale = (
                1.0
                if spec.clip_grad_norm is None or norm <= spec.clip_grad_norm
                else spec.clip_grad_norm / norm
            )
            self.first = {
                state.name: state.first_moment / (1 - spec.betas[0]) / scale
                for state in engine.export_state()
            }


class WatchedActor(PPOActor):
    gradients: GradientsOf

    def _optimizer_step(self) -> float:
        norm = super()._optimizer_step()
        self.gradients.keep(self.engine, norm)  # type: ignore[arg-type]
        return norm


class WatchedCritic(PPOCritic):
    gradients: GradientsOf

    def _optimizer_step(self) -> float:
        norm = super()._optimizer_step()
        self.gradients.keep(self.engine, norm)  # type: ignore[arg-type]
        return norm


def build_engine(case: dict[str, Any], folder: Path, *, model_folder: Path) -> FSDPEngine:
    """Return the engine that the trace's module was.

    Weights copied to the name that transformers looks for.
    """
    folder.mkdir()
    shutil.copy(model_folder / "config.json", folder)
    shutil.copy(next(model_folder.glob("*.safetensors")), folder / "model.safetensors")
    is_critic = case["model"] == "critic"
    optim, is_bf16 = case["config"]["optim"], "bf16" in case["case"]
    engine = FSDPEngine(
        FSDPConfig(
            model=ModelSpec(
                path=str(folder), model_type="value_model" if is_critic else "language_model"
            ),
            optimizer=OptimizerSpec(
                lr=optim["lr"],
                betas=tuple(optim["betas"]),
                weight_decay=optim["weight_decay"],
                decays_vectors=True,
                clip_grad_norm=case["config"]["grad_clip"],
            ),
            precision=PrecisionSpec(compute="bf16" if is_bf16 else "fp32"),
            device="cpu",
            strategy="fsdp1" if case["fsdp"] == 1 else "fsdp2",
        )
    )
    engine.init_model()
    return engine


def replay(case_folder: Path, *, folder: Path) -> dict[str, Any]:
    """Measure everything in the trace's file on this rank."""
    case = json.loads((case_folder / "case.json").read_text())
    inputs = load_file(case_folder / case["inputs"])
    engine = build_engine(case, folder, model_folder=case_folder / case["model_files"])
    first, last = case["rows_per_rank"][engine.topology.dp.rank]
    data = DataProto.from_dict(
        tensors={key: inputs[name][first:last] for key, name in case["batch_keys"].items()}
    )
    config = {
        **case["config"],
        "ppo_mini_batch_size": case["ppo_mini_batch_size_after_worker_normalization"],
    }
    result = (_replay_critic if case["model"] == "critic" else _replay_actor)(
        case, config, engine, data
    )
    with engine.export_weights() as stream:
        result |= {f"param.{name}": tensor for name, tensor in stream}
    engine.close()
    return result


def _replay_actor(
    case: dict[str, Any], config: dict[str, Any], engine: FSDPEngine, data: DataProto
) -> dict[str, Any]:
    actor = WatchedActor(config, engine)
    actor.gradients = GradientsOf()

    def read(moment: str) -> dict[str, Tensor]:
        requested = DataProto(data.batch, meta_info=dict(case["log_prob_meta_info"]))
        return {
            f"{moment}.{name}": value
            for name, value in actor.compute_log_prob(requested, calculate_entropy=True).items()
        }

    result: dict[str, Any] = read("before")
    if any("update_policy" in call for call in case["calls"]):
        torch.manual_seed(1234)
        result["metrics"] = actor.update_policy(
            DataProto(data.batch, meta_info=dict(case["meta_info"]))
        )
        result |= read("after")
        result |= {
            f"grad0.{name}": gradient for name, gradient in (actor.gradients.first or {}).items()
        }
    return result


def _replay_critic(
    case: dict[str, Any], config: dict[str, Any], engine: FSDPEngine, data: DataProto
) -> dict[str, Any]:
    critic = WatchedCritic(config, engine)
    critic.gradients = GradientsOf()
    requested = DataProto(data.batch, meta_info=dict(case["compute_values_meta_info"]))
    result: dict[str, Any] = {"before.values": critic.compute_values(requested)}
    result["metrics"] = critic.update_critic(DataProto(data.batch))
    result["after.values"] = critic.compute_values(requested)
    return result | {
        f"grad0.{name}": gradient for name, gradient in (critic.gradients.first or {}).items()
    }


def main(out: Path, cases: list[Path]) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {
            str(case): replay(case, folder=Path(folder) / str(i)) for i, case in enumerate(cases)
        }
    torch.save(results, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
