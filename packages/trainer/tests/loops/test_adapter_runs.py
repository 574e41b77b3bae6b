"""Whole small runs whose actor is an adapter on a frozen base."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from temper_trainer.loops import RunResult

pytest.importorskip("peft", reason="adapters need peft: pip install './packages/engine-fsdp[lora]'")

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
LORA = ("actor.engine.lora.rank=4", "actor.engine.lora.alpha=8", "actor.engine.optimizer.lr=1e-2")
KL = (
    "warm_start=null",
    "data.eval=null",
    "algorithm.kl_loss_coef=0.1",
    "run.total_steps=3",
    "run.save_model=false",
)


@pytest.mark.bitwise
def test_disabled_adapter_equals_the_frozen_reference(run: Run, rows: Rows, tmp_path: Path) -> None:
    run(tmp_path / "role", *LORA, *KL, "ref=frozen")
    run(tmp_path / "adapter", *LORA, *KL, "algorithm.kl_reference=disabled_adapter")
    assert rows(tmp_path / "adapter") == rows(tmp_path / "role")
    kl = [row["policy/ref_kl"] for row in rows(tmp_path / "adapter")]
    assert kl[0] == 0.0, "a fresh adapter is its own reference"
    assert all(later > 0.0 for later in kl[1:])


@pytest.mark.bitwise
def test_run_with_an_adapter_resumes_bitwise_and_exports_a_merged_model(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    settings = (*LORA, "data.eval=null")
    run(tmp_path / "whole", *settings)
    run(tmp_path / "parts", *settings, "run.total_steps=2", "run.save_model=false")
    run(tmp_path / "parts", *settings, "run.resume=auto")
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    uninterrupted, parts = (
        load_file(tmp_path / name / "huggingface" / "model.safetensors")
        for name in ("whole", "parts")
    )
    assert not [name for name in uninterrupted if "lora" in name]
    assert all(torch.equal(uninterrupted[name], parts[name]) for name in uninterrupted)
