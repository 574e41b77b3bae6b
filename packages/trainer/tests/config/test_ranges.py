"""Numbers outside their range are refused before a run, with their key and value."""

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load

RL = ["data.train.paths=[train.jsonl]", "actor.engine.model.path=model"]
WITH_WARM_START = [*RL, "warm_start.total_steps=5"]
QUICKSTART = ["experiment=quickstart"]
RAY = [*RL, "runtime.kind=ray"]
PPO = [*RL, "algorithm=ppo"]


@pytest.mark.parametrize(
    ("base", "wrong"),
    [
        (RL, "rollout.max_concurrent=0"),
        (RL, "rollout.canary_tolerance=0"),
        (RL, "rollout.canary_tolerance=nan"),
        (RL, "actor.num_workers=0"),
        (RL, "run.seed=-1"),
        (RL, "run.total_steps=0"),
        (RL, "run.num_threads=0"),
        (RL, "run.save_every=-1"),
        (RL, "run.eval_every=-1"),
        (RL, "run.table_every=-1"),
        (RL, "run.num_table_rows=-1"),
        (RL, "run.max_ckpt_to_keep=0"),
        (RL, "reward.max_failure_fraction=-1"),
        (RL, "reward.max_failure_fraction=1.5"),
        (RL, "reward.timeout_s=-1"),
        (RL, "reward.num_workers=-1"),
        (RL, "reward.num_threads=0"),
        (RL, "sampling.temperature=nan"),
        (RL, "sampling.top_p=0"),
        (RL, "sampling.top_k=-1"),
        (RL, "sampling.stop=['']"),
        (RL, "run.eval_sampling.max_tokens=0"),
        (RL, "algorithm.entropy_coef=nan"),
        (RL, "algorithm.kl_loss_coef=-0.1"),
        (RL, "algorithm.kl_reward_coef=-0.1"),
        (RL, "algorithm.policy_loss.clip_low=-1"),
        (RL, "algorithm.policy_loss.clip_high=-1"),
        (RL, "algorithm.policy_loss.dual_clip=1"),
        (RL, "algorithm.group_size=0"),
        (PPO, "algorithm.advantage.gamma=1.1"),
        (PPO, "algorithm.advantage.gae_lambda=-0.1"),
        (PPO, "algorithm.advantage.value_clip=0"),
        (RL, "actor.engine.optimizer.lr=nan"),
        (RL, "actor.engine.optimizer.weight_decay=nan"),
        (RL, "actor.engine.optimizer.clip_grad_norm=nan"),
        (RL, "data.max_prompt_tokens=-5"),
        (RL, "data.train.max_rows=0"),
        (QUICKSTART, "data.eval.max_rows=-1"),
        (QUICKSTART, "data.train.split=validation"),
        (RL, "data.prompt_template=Question"),
        (WITH_WARM_START, "warm_start.batch_size=0"),
        (RL, "warm_start.total_steps=0"),
        (RAY, "runtime.cpus_per_worker=0"),
        (RAY, "runtime.gpus_per_worker=-1"),
        (RAY, "runtime.worker_timeout_s=0"),
    ],
)
def test_number_outside_its_range_is_refused_with_key_and_value(
    base: list[str], wrong: str
) -> None:
    key, _, value = wrong.partition("=")
    block, _, name = key.rpartition(".")
    with pytest.raises(ConfigError, match=rf"\b{name} (is )?.*{value.strip('[]')}") as caught:
        load([*base, wrong])
    assert str(caught.value).startswith(block)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "reward.max_failure_fraction=0",
            "reward.num_workers=0",
            "run.save_every=0",
            "run.max_ckpt_to_keep=1",
        ],
        [
            "reward.max_failure_fraction=1",
            "data.train.max_rows=1",
            "run.num_threads=1",
            "algorithm.entropy_coef=-0.01",
        ],
        [
            "algorithm=ppo",
            "algorithm.advantage.gamma=0",
            "algorithm.advantage.gae_lambda=1",
            "algorithm.advantage.value_clip=null",
        ],
    ],
)
def test_bounds_of_a_range_are_inclusive(overrides: list[str]) -> None:
    load([*RL, *overrides])


def test_collective_timeout_of_zero_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"actor.*engine.*collective_timeout_s is 0\.0, but must be above 0"
    ):
        load([*RL, "actor.engine.collective_timeout_s=0"])


def test_run_folder_must_not_be_a_url() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir is 's3://bucket/run', a URL: give a folder"):
        load([*RL, "run.dir=s3://bucket/run"])


def test_run_folder_must_have_a_name() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir is empty: name a folder, such as runs/mine"):
        load([*RL, "run.dir="])
