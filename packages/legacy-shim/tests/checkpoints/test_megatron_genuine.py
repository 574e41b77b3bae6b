"""Read Megatron's own distributed checkpoints of a dense model and of a mixture."""

import json
import queue
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from megatron_engines import check_states, with_drawn_moments
from test_megatron import CONFIG

from temper_engine_api.engine import BaseEngine
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec
from temper_engine_api.weights import TrainingState
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_legacy_shim.checkpoints import Options, Sources, convert, open_checkpoint, plan_jobs
from temper_legacy_shim.checkpoints.files.lazy import as_torch
from temper_legacy_shim.checkpoints.temper.training_state import resumable, training_state

DENSE = {**CONFIG, "num_hidden_layers": 2}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:megatron.core"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:full scope is deprecated"),
]


def write(
    folder: Path, architecture: dict[str, object], *, sharding: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, TrainingState]:
    """Return a role directory as 0.8 left it, and what the optimizer held.

    The moments are drawn, and two updates are made of them.
    """
    pytest.importorskip(
        "megatron.core",
        reason="needs megatron-core: an environment with temper-engine-megatron runs this",
    )
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda *_: None
    )  # Megatron waits for a device that is not here,
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # gathers on it,
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *_: tensor)  # and sends from it,
    monkeypatch.setattr(
        filesystem_async, "_results_queue", queue.Queue()
    )  # and would start a process for a queue
    with with_drawn_moments(architecture, compute="bf16") as (chunk, optimizers, expected):
        optimizer = optimizers[0] if len(optimizers) == 1 else ChainedOptimizer(optimizers)
        metadata = {
            "distrib_optim_sharding_type": sharding,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        model = chunk.sharded_state_dict(metadata=metadata)
        state = {
            "model": model,
            "optimizer": optimizer.sharded_state_dict({"model": model}, metadata=metadata),
        }
        (folder / "dist_ckpt").mkdir(parents=True)
        dist_checkpointing.save(
            state | {"lr_scheduler": {"num_steps": 1, "max_lr": 1e-2}},
            str(folder / "dist_ckpt"),
            content_metadata=metadata,
        )
    (folder / "huggingface").mkdir()
    (folder / "huggingface/config.json").write_text(json.dumps(architecture))
    return expected


SAVES = [
    pytest.param(DENSE, "fully_reshardable", id="dense"),
    # Nightly: the next test reads saves of a mixture every day.
    pytest.param(MIXTURE, "fully_reshardable", id="mixture", marks=pytest.mark.nightly),
    pytest.param(DENSE, "dp_reshardable", id="dense-in-buckets"),
    pytest.param(MIXTURE, "dp_reshardable", id="mixture-in-buckets", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("architecture", "sharding"), SAVES)
def test_masters_moments_and_counts_of_a_genuine_save_are_what_its_optimizer_had(
    architecture: dict[str, object], sharding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write(tmp_path / "actor", architecture, sharding=sharding, monkeypatch=monkeypatch)
    model = open_checkpoint(tmp_path / "actor")
    for name, tensor in model.weights.items():
        assert torch.equal(as_torch(tensor), expected[name].master.bfloat16()), name
    check_states(training_state(model), expected)
    assert resumable(model).extra.num_schedule_steps == 1


@pytest.mark.parametrize("name", ["fsdp", "megatron"])
def test_both_engines_go_on_with_a_mixture_that_megatron_saved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = write(
        tmp_path / "actor", MIXTURE, sharding="fully_reshardable", monkeypatch=monkeypatch
    )
    (job,) = plan_jobs(tmp_path / "actor", tmp_path / "out")
    convert(job, Options(target="temper", checks_names=False), Sources())
    model, optimizer = ModelSpec(architecture=MIXTURE), OptimizerSpec(lr=1e-2)
    precision = PrecisionSpec(compute="fp32")
    engine: BaseEngine
    if name == "fsdp":
        engine = FSDPEngine(
            FSDPConfig(model=model, optimizer=optimizer, precision=precision, device="cpu")
        )
    else:
        from temper_engine_megatron.config import MegatronConfig
        from temper_engine_megatron.engine import MegatronEngine

        engine = MegatronEngine(
            MegatronConfig(model=model, optimizer=optimizer, precision=precision, device="cpu")
        )
    engine.init_model()
    try:
        engine.load_checkpoint(str(tmp_path / "out"))
        assert engine.num_updates == 2
        check_states(engine.export_state(), expected)
    finally:
        engine.close()
