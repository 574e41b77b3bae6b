"""Translated configurations that really train.

A few steps of a tiny model, on data in the old columns.

With TEMPER_TRAINED_TABLE=FILE each run adds its row to a table: release, algorithm, steps, and the
last step's numbers.
"""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("temper_trainer", reason="needs temper-trainer and temper-engine-fsdp")

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoints"))

import pyarrow as pa
import torch
from old_files import write_fsdp
from pyarrow import parquet
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from temper_legacy_shim.cli import app
from temper_legacy_shim.configs import Outcome, translate
from temper_legacy_shim.configs.report import yaml_of
from temper_legacy_shim.configs.translate import make_cpu_trial
from temper_legacy_shim.scripts.launch_translation import Options
from temper_legacy_shim.scripts.migrate import migrate_script
from temper_trainer.__main__ import main
from temper_trainer.config.data import TokenizerConfig
from temper_trainer.config_loading import load, write_resolved
from temper_trainer.data.tokenizer import build_tokenizer
from temper_trainer.loops import train

from .checking import command, run
from .conftest import translated, values

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
HERE = (
    "actor.engine.device=cpu",
    "actor.engine.precision.compute=fp32",
    "run.num_threads=1",
    "run.report=false",
    "rollout.dtype=fp32",
    "run.table_every=0",
)
"""Overrides for a CPU in addition to the translation.

Later files win, as a user's own settings would.
"""
HERE_SFT = HERE[:4]
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": (
        "v0.7.0",
        (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.use_kl_loss=True",
            "actor_rollout_ref.rollout.n=2",
        ),
    ),
    "dr_grpo": (
        "v0.6.1",
        (
            "algorithm.adv_estimator=grpo",
            "algorithm.norm_adv_by_std_in_grpo=False",
            "actor_rollout_ref.rollout.n=2",
        ),
    ),
    "rloo": ("v0.4.1", ("algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=2")),
    "reinforce": ("v0.5.0", ("algorithm.adv_estimator=reinforce_plus_plus",)),
    "ppo": (
        "v0.4.0",
        ("algorithm.adv_estimator=gae", "critic.model.path={model}", "critic.optim.lr=1e-4"),
    ),
    "kl_in_reward": (
        "v0.3.0.post1",
        ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"),
    ),
    "fsdp2": (
        "v0.8.0",
        (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.strategy=fsdp2",
            "actor_rollout_ref.rollout.n=2",
        ),
    ),
    "lora": (
        "v0.6.0",
        (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.model.lora_rank=4",
            "actor_rollout_ref.rollout.n=2",
        ),
    ),
    "cosine": (
        "v0.7.1",
        (
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5",
        ),
    ),
}
KINDS |= {
    "gpg": (
        "v0.7.1",
        (
            "algorithm.adv_estimator=gpg",
            "actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
            "actor_rollout_ref.rollout.n=2",
        ),
    ),
    "group of one": ("v0.6.1", ("algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=1")),
}
# Nightly: each kind trains for some steps. GRPO trains every day, and test_meaning.py compares
# settings of old and new runs.
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in KINDS if name != "grpo"]


@pytest.fixture(scope="module")
def old_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a model, prompts in old columns, and an old reward file."""
    folder = tmp_path_factory.mktemp("old")
    texts = ["user assistant add 1 2 3 4 5 6 7 8 9 0 and #### ?"]
    tokenizer = build_tokenizer(
        TokenizerConfig(kind="word_level"),
        model_path=None,
        texts=texts,
        directory=folder / "tokenizer",
    )
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"add {i} and {j} ?"}],
            "reward_model": {"style": "rule", "ground_truth": str((i + j) % 10)},
            "extra_info": {
                "index": i,
                "question": f"add {i} and {j} ?",
                "answer": f"#### {(i + j) % 10}",
            },
        }
        for i in range(4)
        for j in range(3)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'sums' and 'index' in extra_info\n"
        "    return {'score': float(sum(c.isdigit() for c in solution_str)) / (1 + "
        "len(solution_str))}\n"
    )
    return folder


def losses(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def record(kind: str, *, version: str, phase: str, rows: list[dict[str, float]]) -> None:
    """Add a row to the table that is asked for."""
    if (table := os.environ.get("TEMPER_TRAINED_TABLE")) is None:
        return
    steps = [row for row in rows if row["phase"] == phase]
    first, last = steps[0], steps[-1]
    reward = (
        f"{first['reward/mean']:.3f} to {last['reward/mean']:.3f}" if "reward/mean" in last else "-"
    )
    cells = (
        kind,
        version,
        f"{last['step']}",
        f"{first['actor/loss']:.4g} to {last['actor/loss']:.4g}",
        f"{last['actor/grad_norm']:.3g}",
        reward,
    )
    with Path(table).open("a", encoding="utf-8") as out:
        out.write(f"| {' | '.join(cells)} |\n")


def train_translated(
    overrides: list[str], *, version: str, entry: str, here: tuple[str, ...], folder: Path
) -> list[dict[str, float]]:
    """Translate, write, load with what this machine needs, train; the logged rows."""
    translation = translate(overrides, version=version, entry=entry)
    assert translation.outcome is not Outcome.PERSON, [
        f.message for f in translation.findings if f.level == "person"
    ]
    (folder / "old.yaml").write_text(yaml_of(translation))
    loaded = load([*here, f"run.dir={folder / 'run'}"], config_dir=str(folder), config_name="old")
    train(
        loaded.config,
        digest=loaded.digest,
        write_config=lambda position: write_resolved(loaded, position),
    )
    return losses(folder / "run")


@pytest.mark.filterwarnings(
    "ignore:.*both parameters with requires_grad:UserWarning"
)  # torch's FSDP1 about any adapter
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["grpo", *NIGHTLY])
def test_a_translated_rl_run_trains(kind: str, old_project: Path, tmp_path: Path) -> None:
    version, extra = KINDS[kind]
    overrides = [
        f"data.train_files={old_project / 'train.parquet'}",
        f"actor_rollout_ref.model.path={old_project / 'model'}",
        "actor_rollout_ref.rollout.name=hf",
        f"custom_reward_function.path={old_project / 'reward.py'}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        "trainer.n_gpus_per_node=1",
        "trainer.total_epochs=1",
        "trainer.logger=[console]",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        *(item.format(model=old_project / "model") for item in extra),
        f"{'' if version >= 'v0.4' else '+'}trainer.val_before_train=False",
    ]
    rows = train_translated(
        overrides, version=version, entry="verl.trainer.main_ppo", here=HERE, folder=tmp_path
    )
    record(kind, version=version, phase="rl", rows=rows)
    assert [row["step"] for row in rows if row["phase"] == "rl"] == [
        1,
        2,
        3,
    ]  # one pass of 12 prompts in steps of 4
    assert all(
        math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float)
    )
    assert any(row.get("actor/grad_norm", 0.0) > 0 for row in rows)


def test_a_translated_fine_tuning_run_trains(old_project: Path, tmp_path: Path) -> None:
    overrides = [
        f"data.train_files={old_project / 'train.parquet'}",
        f"data.val_files={old_project / 'train.parquet'}",
        "trainer.test_freq=3",
        f"model.partial_pretrain={old_project / 'model'}",
        "data.prompt_key=extra_info",
        "data.response_key=extra_info",
        "+data.prompt_dict_keys=['question']",
        "+data.response_dict_keys=['answer']",
        "data.train_batch_size=4",
        "data.micro_batch_size_per_gpu=2",
        "data.max_length=32",
        "optim.lr=1e-3",
        "trainer.total_epochs=2",
        "trainer.logger=[console]",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
    ]
    rows = train_translated(
        overrides,
        version="v0.6.1",
        entry="verl.trainer.fsdp_sft_trainer",
        here=HERE_SFT,
        folder=tmp_path,
    )
    record("fine-tuning, first generation", version="v0.6.1", phase="sft", rows=rows)
    assert [row["step"] for row in rows if row["phase"] == "sft"] == [1, 2, 3, 4, 5, 6]
    loss = [row["actor/loss"] for row in rows if row["phase"] == "sft"]
    assert loss[-1] < loss[0]
    assert [row["step"] for row in rows if "eval/sft/loss" in row] == [0, 3, 6]


def test_cpu_trial_of_a_script_for_eight_gpus_trains(
    old_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        f"python3 -m verl.trainer.main_ppo data.train_files={old_project}/train.parquet "
        f"data.val_files={old_project}/train.parquet "
        f"actor_rollout_ref.model.path={old_project}/model "
        f"custom_reward_function.path={old_project}/reward.py "
        "algorithm.adv_estimator=gae critic.optim.lr=1e-5 actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.rollout.n=8 "
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2 "
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 "
        "actor_rollout_ref.actor.fsdp_config.param_offload=True trainer.n_gpus_per_node=8 "
        "trainer.nnodes=2 trainer.test_freq=5 "
        f"critic.model.path={old_project}/model actor_rollout_ref.actor.optim.lr_warmup_steps=10 "
        "data.max_prompt_length=16\n"
    )
    migration = migrate_script(text, options=Options(version="v0.6.1", cpu_trial=True))
    assert migration.outcome is not Outcome.PERSON
    monkeypatch.chdir(tmp_path)
    assert main([argument.text.shown() for argument in migration.launches[0].arguments]) == 0
    rows = [row for row in losses(tmp_path / "runs/cpu_trial") if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[-1]["actor/grad_norm"] > 0


@pytest.mark.usefixtures("fork_comparing_processes")
def test_resumed_run_keeps_the_base_model_as_reference(
    old_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Qwen2ForCausalLM.from_pretrained(old_project / "model")
    with torch.no_grad():
        trained.lm_head.weight.mul_(3)
    actor = tmp_path / "old/global_step_2/actor"
    write_fsdp(actor, trained.state_dict())
    without = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(old_project / "model", actor / "huggingface", ignore=without)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["checkpoint", "old", "--to", "temper", "--out", "resumed"])
    assert result.exit_code == 0, result.output
    text = (
        f"MODEL={old_project}/model\n"
        f"python3 -m verl.trainer.main_ppo data.train_files={old_project}/train.parquet "
        f"custom_reward_function.path={old_project}/reward.py actor_rollout_ref.model.path=$MODEL "
        "algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True "
        "actor_rollout_ref.rollout.n=2 data.train_batch_size=4 data.max_prompt_length=16 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=4 data.max_response_length=6 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.rollout.name=hf "
        "actor_rollout_ref.actor.optim.lr=1e-9 trainer.n_gpus_per_node=1 trainer.test_freq=-1 "
        "trainer.total_epochs=1 trainer.logger=[console] trainer.val_before_train=False\n"
    )
    migration = migrate_script(text, options=Options(version="v0.7.0"))
    assert migration.script is not None
    assert migration.script.text.count(str(old_project / "model")) == 1  # stated once
    argv = [argument.text.shown() for argument in migration.launches[0].arguments]
    assert sum(".model.path=" in word for word in argv) == 1

    assert main([*argv, *HERE, "run.dir=fresh", "run.total_epochs=null", "run.total_steps=1"]) == 0
    assert main([*argv, *HERE, "run.dir=next", "run.resume=resumed"]) == 0
    (fresh,) = (row for row in losses(tmp_path / "fresh") if row["phase"] == "rl")
    (resumed,) = (row for row in losses(tmp_path / "next") if row["phase"] == "rl")
    assert resumed["step"] == 3
    assert fresh["policy/ref_kl"] == pytest.approx(0, abs=1e-6)  # the policy is the base model
    assert resumed["policy/ref_kl"] > 0.01
    # Three times the logits make the policy more certain: it is the old run's, not the base model.
    assert resumed["policy/entropy"] < fresh["policy/entropy"] - 0.01


@pytest.mark.parametrize(
    "schedule",
    [
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285",),
        (
            "actor_rollout_ref.actor.optim.warmup_style=cosine",
            "trainer.total_training_steps=100",
        ),
        ("algorithm.adv_estimator=gae", "critic.optim.lr_warmup_steps_ratio=0.05"),
    ],
)
def test_cpu_trial_of_a_scheduled_run_is_accepted(
    schedule: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_cpu_trial(translated("v0.4.1", *schedule))
    monkeypatch.chdir(tmp_path)
    code, given = run(command(trial, tmp_path, name="trial"))
    assert (code, given) == (0, "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("actor_rollout_ref.model.trust_remote_code=True", {}),
        (
            "+actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True",
            {"actor.engine.offload.optimizer": True},
        ),
    ],
)
def test_megatron_run_has_no_setting_that_its_engine_refuses(
    old: str, new: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("temper_engine_megatron", reason="needs temper-engine-megatron")
    result = translated("v0.8.0", "model_engine=megatron", "trainer.n_gpus_per_node=1", old)
    assert "refused" not in {finding.level for finding in result.findings}
    assert new.items() <= values(result).items()
    assert {token.disposition for token in result.tokens if token.text == old} <= {
        "mapped",
        "dropped",
    }
    monkeypatch.chdir(tmp_path)
    code, given = run(command(result, tmp_path, name="new"))
    assert (code, given) == (0, "")
