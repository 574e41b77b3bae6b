"""The real GSM8K files, end to end: a tokenizer trained on them, then SFT, GRPO and PPO with a critic, a few dozen updates each."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from temper_trainer.loops import RunResult

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'temper-trainer[ray]'")
GSM8K = Path(__file__).parents[5] / "shared" / "gsm8k"
pytestmark = [
    pytest.mark.timeout(1200),  # two minutes alone on two fast cores
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.skipif(
        not GSM8K.is_dir(), reason="needs the GSM8K files (train.jsonl, test.jsonl) in ../shared/gsm8k beside the repository"
    ),
]

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
NUM_STEPS = 24


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The first 512 training and 8 test problems, as jsonl and as parquet made from it."""
    folder = tmp_path_factory.mktemp("gsm8k")
    made = {}
    for name, count in (("train", 512), ("test", 8)):
        lines = (GSM8K / f"{name}.jsonl").read_text().splitlines()[:count]
        made[name] = folder / f"{name}.jsonl"
        made[name].write_text("\n".join(lines) + "\n")
        made[f"{name}_parquet"] = folder / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(line) for line in lines]), made[f"{name}_parquet"])
    return made


def test_sft_then_grpo_then_ppo_on_real_problems(run: Run, rows: Rows, files: dict[str, Path], tmp_path: Path, cluster: None) -> None:
    common = ("run.num_threads=1", f"run.total_steps={NUM_STEPS}")
    sft = ("experiment=gsm8k_sft", f"data.train.paths=[{files['train']}]", "batching.prompts_per_step=16")
    run(tmp_path / "sft", *common, base=sft)
    losses = [row["actor/loss"] for row in rows(tmp_path / "sft", phase="sft")]
    assert len(losses) == NUM_STEPS
    assert losses[-1] < losses[0] - 0.5

    model = f"actor.engine.model.path={tmp_path / 'sft' / 'huggingface'}"
    parquet = ("data.train.kind=parquet", f"data.train.paths=[{files['train_parquet']}]")
    few = ("sampling.max_tokens=24", "reward.function=temper_trainer_test_rewards:share_of_digits", "run.table_every=0")
    grpo = ("experiment=gsm8k_grpo", model, *parquet, *few, f"data.eval.paths=[{files['test']}]", "run.eval_sampling.max_tokens=24")
    run(tmp_path / "grpo", *common, base=grpo)
    found = rows(tmp_path / "grpo")
    assert len(found) == NUM_STEPS
    assert found[0]["policy/first_ratio_error_max"] == 0.0

    run(tmp_path / "grpo_parts", "run.num_threads=1", f"run.total_steps={NUM_STEPS // 2}", "run.save_model=false", base=grpo)
    run(tmp_path / "grpo_parts", *common, "run.resume=auto", base=grpo)
    assert rows(tmp_path / "grpo_parts") == found
    whole, parts = (load_file(tmp_path / name / "huggingface" / "model.safetensors") for name in ("grpo", "grpo_parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)

    trained = f"actor.engine.model.path={tmp_path / 'grpo' / 'huggingface'}"
    ppo = ("experiment=gsm8k_ppo", trained, *parquet, *few, "batching.prompts_per_step=16", "batching.num_mini_batches=2")
    run(tmp_path / "ppo", *common, base=ppo)
    run(tmp_path / "ppo_ray", *common, "runtime.kind=ray", "runtime.cpus_per_worker=0.5", base=ppo)
    found = rows(tmp_path / "ppo")
    assert len(found) == NUM_STEPS
    assert found[0]["policy/first_ratio_error_max"] == 0.0
    assert all(row["critic/grad_norm"] > 0 for row in found)
    assert rows(tmp_path / "ppo_ray") == found
