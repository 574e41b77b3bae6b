"""Translate old runs and resolve the translations with the trainer: `translations.py FOLDER`.

Runs with released sources and therefore uses only the public interface of that version.
"""

import json
import sys
from pathlib import Path

from temper_legacy_shim.configs import translate
from temper_legacy_shim.configs.report import yaml_of
from temper_trainer.config_loading import load
from temper_trainer.config_loading.schema import flatten

PPO = "verl.trainer.main_ppo"
ACTOR = "actor_rollout_ref.actor"
BATCH = (
    "data.train_batch_size=64",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
)
FILES = (
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    "actor_rollout_ref.model.path=model",
)
RUN = (*FILES, *BATCH, "actor_rollout_ref.rollout.name=vllm", "trainer.total_epochs=1")
GROUPS = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")

OLD_RUNS: dict[str, tuple[str, str, str | None, tuple[str, ...]]] = {
    "grpo": ("v0.7.0", PPO, None, (*RUN, *GROUPS, f"{ACTOR}.use_kl_loss=True")),
    "kl_in_reward": ("v0.3.0.post1", PPO, None, (*RUN, *GROUPS, "algorithm.kl_ctrl.kl_coef=0.01")),
    "rloo": (
        "v0.4.1",
        PPO,
        None,
        (*RUN, "algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=4"),
    ),
    "critic": (
        "v0.4.0",
        PPO,
        None,
        (*RUN, "algorithm.adv_estimator=gae", "critic.model.path=model", "critic.optim.lr=1e-5"),
    ),
    "adapter": ("v0.6.0", PPO, None, (*RUN, *GROUPS, "actor_rollout_ref.model.lora_rank=8")),
    "reward_file": ("v0.6.1", PPO, None, (*RUN, *GROUPS, "custom_reward_function.path=reward.py")),
    "fsdp2": ("v0.8.0", PPO, None, (*RUN, *GROUPS, f"{ACTOR}.strategy=fsdp2")),
    "megatron": (
        "v0.6.0",
        PPO,
        "ppo_megatron_trainer",
        (
            *RUN,
            *GROUPS,
            f"{ACTOR}.megatron.tensor_model_parallel_size=2",
            "trainer.n_gpus_per_node=2",
        ),
    ),
    "sft": (
        "v0.5.0",
        "verl.trainer.fsdp_sft_trainer",
        None,
        (
            "data.train_files=train.parquet",
            "data.val_files=test.parquet",
            "model.partial_pretrain=model",
            "data.train_batch_size=32",
        ),
    ),
}
"""Release, program, configuration name and overrides, by run."""


def main(folder: Path) -> None:
    """Write each translation to FOLDER/NAME.yaml and its resolved values to FOLDER/NAME.json."""
    folder.mkdir(parents=True)
    for name, (release, entry, config_name, overrides) in OLD_RUNS.items():
        translation = translate(
            list(overrides), entry=entry, config_name=config_name, version=release
        )
        (folder / f"{name}.yaml").write_text(yaml_of(translation))
        values = flatten(load([], config_dir=str(folder), config_name=name).resolved)
        (folder / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
