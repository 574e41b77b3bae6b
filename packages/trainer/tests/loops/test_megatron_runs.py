"""Compare small runs on the Megatron engine with the FSDP engine, and resume across engines."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from temper_trainer.loops import RunResult

pytest.importorskip("megatron.core", reason="needs temper-engine-megatron with Megatron-Bridge")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="Megatron uses CUDA wherever torch sees it: start with CUDA_VISIBLE_DEVICES=",
)

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
MEGATRON = ("model_engine=megatron",)
SFT = (
    "experiment=quickstart",
    "task=sft",
    "warm_start=null",
    *(
        f"actor.engine.model.architecture.{size}"
        for size in ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=2")
    ),
    "data.train.max_rows=64",
    "data.eval.max_rows=8",
    "batching.prompts_per_step=16",
    "run.num_threads=1",
    "run.report=false",
)
PPO = (
    "algorithm=ppo",
    "batching.num_mini_batches=2",
    "ref=frozen",
    "algorithm.kl_loss_coef=0.01",
    "actor.engine.precision.compute=fp32",
    "critic.engine.precision.compute=fp32",
    "ref.engine.precision.compute=fp32",
    "run.total_steps=2",
    "data.eval=null",
    "run.save_model=false",
)
CLOSE = {"rel": 2e-4, "abs": 2e-5}


def assert_same(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(actual) == len(expected) > 0
    for row, want in zip(actual, expected, strict=True):
        assert row.keys() == want.keys()
        for name, value in want.items():
            assert row[name] == pytest.approx(value, **CLOSE), name


# Nightly: trains two warm starts and two runs. SFT is compared below every day, and the kit
# compares losses and updates of both engines with one oracle.
@pytest.mark.nightly
def test_ppo_with_critic_and_reference_trains_as_on_fsdp(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(tmp_path / "fsdp", *PPO)
    run(tmp_path / "megatron", *PPO, *MEGATRON)
    for phase in ("warm_start", "rl"):
        assert_same(rows(tmp_path / "megatron", phase=phase), rows(tmp_path / "fsdp", phase=phase))


# Nightly: needs four runs. test_cross_backend.py of engine-megatron continues in the other engine.
@pytest.mark.nightly
def test_run_resumes_in_the_other_engine_and_back(run: Run, rows: Rows, tmp_path: Path) -> None:
    schedule = (
        "actor.engine.precision.compute=fp32",
        "actor.engine.schedule.kind=linear",
        "actor.engine.schedule.total_steps=6",
        "data.eval=null",
        "run.save_model=false",
    )
    run(tmp_path / "whole", *schedule, "run.total_steps=4")
    run(tmp_path / "fsdp", *schedule, "run.total_steps=2")
    saved = tmp_path / "fsdp" / "checkpoints"
    run(
        tmp_path / "megatron",
        *schedule,
        *MEGATRON,
        "run.total_steps=3",
        f"run.resume={last_of(saved)}",
    )
    back = tmp_path / "megatron" / "checkpoints"
    run(tmp_path / "back", *schedule, "run.total_steps=4", f"run.resume={last_of(back)}")
    step_rows = [row for name in ("fsdp", "megatron", "back") for row in rows(tmp_path / name)]
    assert [row["step"] for row in step_rows] == [1, 2, 3, 4]
    assert_same(step_rows, rows(tmp_path / "whole"))


def last_of(folder: Path) -> Path:
    return max(folder.glob("step_*"))


def test_sft_trains_as_on_fsdp_and_exports_the_same_model(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(tmp_path / "fsdp", "run.total_steps=2", base=SFT)
    run(tmp_path / "megatron", "run.total_steps=2", *MEGATRON, base=SFT)
    assert_same(rows(tmp_path / "megatron", phase="sft"), rows(tmp_path / "fsdp", phase="sft"))
    actual, expected = (
        load_file(tmp_path / name / "huggingface" / "model.safetensors")
        for name in ("megatron", "fsdp")
    )
    # A key bias has no gradient but rounding, which AdamW makes an update of.
    for weights in (actual, expected):
        weights.update({name: torch.zeros(()) for name in weights if name.endswith("k_proj.bias")})
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


LORA = ("actor.engine.lora.rank=4", "actor.engine.lora.alpha=8", "actor.engine.optimizer.lr=1e-2")
KL = (
    "algorithm.kl_loss_coef=0.1",
    "algorithm.kl_reference=disabled_adapter",
    "run.total_steps=3",
    "data.eval=null",
    "run.save_model=false",
)


# Nightly: needs two runs. The kit compares adapters of both engines with one oracle every day.
@pytest.mark.nightly
def test_adapter_with_its_base_as_reference_trains_as_on_fsdp(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    # Fresh adapters of both engines begin with the same numbers.
    run(tmp_path / "fsdp", *LORA, *KL)
    run(tmp_path / "megatron", *LORA, *KL, *MEGATRON)
    assert_same(rows(tmp_path / "megatron"), rows(tmp_path / "fsdp"))


# Nightly: needs three runs. test_cross_backend.py of engine-megatron continues an adapter in the
# other engine.
@pytest.mark.nightly
def test_sft_of_an_adapter_resumes_in_the_other_engine(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    sft = ("run.save_model=false", *LORA)
    run(tmp_path / "whole", *sft, "run.total_steps=4", base=SFT)
    run(tmp_path / "fsdp", *sft, "run.total_steps=2", base=SFT)
    saved = last_of(tmp_path / "fsdp" / "checkpoints")
    run(
        tmp_path / "megatron", *sft, *MEGATRON, "run.total_steps=4", f"run.resume={saved}", base=SFT
    )
    step_rows = [row for name in ("fsdp", "megatron") for row in rows(tmp_path / name, phase="sft")]
    assert_same(step_rows, rows(tmp_path / "whole", phase="sft"))


TEACHER = (
    "{model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: "
    "2, num_attention_heads: 4, num_key_value_heads: 2, "
    "max_position_embeddings: 256}"
)
TAUGHT = (
    "algorithm=distill",
    f"teachers.t.engine.model={{architecture: {TEACHER}, seed: 5}}",
    "teachers.t.engine.precision.compute=fp32",
    "teachers.t.engine.device=cpu",
    "actor.engine.optimizer.lr=1e-2",
    "run.total_steps=3",
    "data.eval=null",
    "run.save_model=false",
    "warm_start=null",
)


# Nightly: makes three runs for each objective, which the kit compares with the oracle.
@pytest.mark.nightly
@pytest.mark.parametrize(
    "objective",
    [
        "{objective: {name: forward_kl, top_k: 8}}",
        "{objective: {name: jensen_shannon, top_k: 8}}",
        "{clamp: 2.0}",
    ],
)
def test_distillation_has_equal_metrics_on_fsdp2_fsdp1_and_megatron(
    run: Run, rows: Rows, tmp_path: Path, objective: str
) -> None:
    taught = (*TAUGHT, f"distillation={objective}")
    run(tmp_path / "fsdp2", *taught)
    run(
        tmp_path / "fsdp1",
        *taught,
        "actor.engine.strategy=fsdp1",
        "teachers.t.engine.strategy=fsdp1",
    )
    run(tmp_path / "megatron", *taught, *MEGATRON)
    expected = rows(tmp_path / "fsdp2")
    assert expected[-1]["distill/divergence"] < expected[0]["distill/divergence"]
    for engine in ("fsdp1", "megatron"):
        assert_same(rows(tmp_path / engine), expected)
