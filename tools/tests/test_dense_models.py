"""Test the measurements of dense models at realistic sizes on a host without GPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tools.gpu.dense_jobs import Row
from tools.gpu.dense_models import SETS, name_gpus
from tools.gpu.dense_workload import CASES, MIX, make_config
from tools.gpu.workload import CARDS, flops_per_token_and_square

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("model", CARDS)
def test_flops_per_token_are_six_for_every_weight_in_a_product(model: str) -> None:
    sizes = {name: size for name, size in CARDS[model].items() if type(size) is int}
    with torch.device("meta"):
        model_on_meta = AutoModelForCausalLM.from_config(make_config(CARDS[model]))
    weights = {
        # A token uses some of the experts, which are the first dimension of their tensors.
        name: p.numel() if p.ndim == 2 else p[0].numel() * sizes["num_experts_per_tok"]
        for name, p in model_on_meta.named_parameters()
        if p.ndim > 1
    }
    if not CARDS[model]["tie_word_embeddings"]:
        weights.pop("model.embed_tokens.weight")
    assert flops_per_token_and_square(sizes)[0] == 6 * sum(weights.values())


def test_flops_of_attention_are_those_of_a_causal_mask() -> None:
    sizes = {name: size for name, size in CARDS["0.6B"].items() if type(size) is int}
    # 2 products of s x s x 128 in the forward pass and 4 in the backward pass, 2 FLOPs per
    # multiplication, half of it masked: 28 layers of 16 heads.
    assert flops_per_token_and_square(sizes)[1] == 28 * 16 * 6 * 2 * 128 / 2


def test_every_update_on_one_gpu_has_as_many_tokens() -> None:
    updates = [CASES["4k"], CASES["16k"], CASES["64k"], *MIX]
    assert {sum(update.lengths) for update in updates} == {65536}


def test_rows_of_the_sets_name_known_models_and_cases() -> None:
    rows = [Row.parse(name) for names in SETS.values() for name in names]
    assert {row.model for row in rows} <= set(CARDS)
    assert {row.case for row in rows} <= {*CASES, "mix"}


def test_rows_run_on_the_gpus_that_the_program_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert name_gpus([0, 1]) == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert name_gpus([1]) == "5"


# Nightly: trains tiny models in several processes.
@pytest.mark.nightly
def test_second_run_skips_finished_rows(tmp_path: Path) -> None:
    def run(out: str, *more: str) -> list[str]:
        rows = "0.6B/16k/engine,0.6B/16k/plain"
        command = [sys.executable, "-m", "tools.gpu.dense_models", "--rehearse", "--rows", rows]
        done = subprocess.run(
            [*command, "--out", str(tmp_path / out), *more],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / out / "rows.jsonl").read_text().splitlines()
        return sorted(row["name"] for row in map(json.loads, lines) if row["ok"])

    assert run("first") == ["0.6B/16k/engine", "0.6B/16k/plain"]
    assert run("second", "--done", str(tmp_path / "first" / "rows.jsonl")) == []
