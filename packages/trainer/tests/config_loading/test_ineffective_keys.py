from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load

from .conftest import RL, SFT

K2 = "algorithm.kl_estimator=k2"
ARITHMETIC = ["experiment=quickstart"]
FILES = [f"data.train.{key}" for key in ("name=jsonl", "paths=[a.jsonl]", "max_rows=4")]


@pytest.mark.parametrize(
    ("overrides", "key", "other"),
    [
        ([*RL, "runtime.address=auto"], "runtime.address", "runtime.kind inline"),
        ([*RL, "runtime.gpus_per_worker=1"], "runtime.gpus_per_worker", "runtime.kind inline"),
        ([*RL, "actor.pool=big"], "actor.pool", "runtime.kind inline"),
        (
            [*RL, "environment={name: agent, arguments: {command: a}, tool_timeout_s: 1}"],
            "environment.tool_timeout_s",
            "environment.name agent",
        ),
        (
            [*RL, "environment={name: calculator}", "rollout.max_failure_fraction=0.1"],
            "rollout.max_failure_fraction",
            "an environment",
        ),
        (
            [*SFT, "algorithm.policy_loss.clip_low=0.1"],
            "algorithm.policy_loss.clip_low",
            "tasks sft",
        ),
        ([*SFT, "sampling.max_tokens=5"], "sampling.max_tokens", "tasks sft"),
        ([*SFT, "reward.function=exact_match"], "reward.function", "tasks sft"),
        ([*SFT, "loop=async"], "loop", "does not train on what it samples"),
        (
            [*RL, "loop=one_step_off", "asynchrony.max_staleness=2"],
            "asynchrony.max_staleness",
            "loop async",
        ),
        (
            [*RL, "rollout.vllm.enforce_eager=true"],
            "rollout.vllm.enforce_eager",
            "rollout.sampler hf",
        ),
        ([*RL, "runtime.rollout_python=python"], "runtime.rollout_python", "rollout.sampler hf"),
        ([*SFT, "batching.num_mini_batches=2"], "batching.num_mini_batches", "tasks sft"),
        ([*SFT, "run.eval_every=5"], "run.eval_every", "data.eval"),
        (
            [*SFT, "data.eval.paths=[a.jsonl]", "run.eval_sampled=true"],
            "run.eval_sampled",
            "tasks sft",
        ),
        (
            [*SFT, "data.eval.paths=[a.jsonl]", "data.eval.category_key=level"],
            "data.eval.category_key",
            "no categories",
        ),
        ([*RL, "run.eval_every=5"], "run.eval_every", "data.eval"),
        ([*RL, "run.eval_sampled=true"], "run.eval_sampled", "data.eval"),
        ([*RL, "data.train.category_key=level"], "data.train.category_key", "data.eval_sets"),
        (
            [*RL, "data.eval.paths=[test.jsonl]", "run.eval_solved_reward=0.5"],
            "run.eval_solved_reward",
            "run.eval_num_completions 1",
        ),
        ([*RL, "algorithm.kl_estimator=k2"], "algorithm.kl_estimator", "algorithm.kl_loss_coef"),
        (
            [*RL, "algorithm.kl_clamp=10", "algorithm.kl_reward_coef=0.1", "ref=frozen", K2],
            "algorithm.kl_clamp",
            "algorithm.kl_estimator k2",
        ),
        (
            [
                *RL,
                "algorithm.advantage=reinforce_plus_plus",
                "algorithm.whiten_advantages=true",
            ],
            "algorithm.whiten_advantages",
            "always whitens",
        ),
        (
            [*RL, "reward.num_workers=2", "reward.num_threads=2"],
            "reward.num_threads",
            "reward.num_workers",
        ),
        (
            [*RL, "runtime.kind=ray", "runtime.address=a:1", "runtime.bind_address=10.0.0.1"],
            "runtime.bind_address",
            "runtime.address",
        ),
        (
            [*RL, "run.max_ckpt_to_keep=null", "run.keep_every=5"],
            "run.keep_every",
            "run.max_ckpt_to_keep null",
        ),
        (
            [*RL, "run.save_interval_s=null", "run.save_in_background=true"],
            "run.save_in_background",
            "waits for its last save",
        ),
        ([*RL, "data.train.weight=2"], "data.train.weight", "data.train_sets"),
        (
            [*RL, "algorithm.policy_loss.clip_low=0.1"],
            "algorithm.policy_loss.clip_low",
            "batching.num_mini_batches",
        ),
        (
            [*RL, "algorithm.policy_loss.dual_clip=3"],
            "algorithm.policy_loss.dual_clip",
            "batching.num_passes",
        ),
        ([*ARITHMETIC, "data.chat_template=x"], "data.chat_template", "sources arithmetic"),
        ([*RL, "weight_sync.checksum=false"], "weight_sync.checksum", "rollout.sampler hf"),
        ([*RL, "weight_sync.bucket_bytes=2000"], "weight_sync.bucket_bytes", "rollout.sampler hf"),
        (
            [*RL, "rollout.canary=false", "rollout.canary_tolerance=0.1"],
            "rollout.canary_tolerance",
            "rollout.canary false",
        ),
        (
            [*RL, "run.table_every=0", "run.num_table_rows=2"],
            "run.num_table_rows",
            "run.table_every 0",
        ),
        ([*RL, "data.train.chosen_key=good"], "data.train.chosen_key", "task rl"),
        ([*SFT, "data.train.rejected_key=bad"], "data.train.rejected_key", "task sft"),
        ([*RL, "data.train.margin_key=m"], "data.train.margin_key", "task rl"),
        ([*RL, "data.train.label_key=good"], "data.train.label_key", "task rl"),
        (
            [*RL, "task=dpo", "ref=frozen", "data.train.difficulty_key=level"],
            "data.train.difficulty_key",
            "prompts or demonstrations",
        ),
        (
            [*RL, "data.eval.paths=[a]", "data.eval.difficulty_key=level"],
            "data.eval.difficulty_key",
            "prompts or demonstrations",
        ),
        (
            [
                *RL,
                "data.train.difficulty_key=level",
                "data.shuffle=false",
                "data.shuffled_fraction=0.1",
            ],
            "data.shuffled_fraction",
            "without data.shuffle: remove it, or set data.shuffle=true.",
        ),
        ([*RL, "data.shuffled_fraction=0.1"], "data.shuffled_fraction", "difficulty_key"),
        ([*RL, "data.train.loss_weight_key=w"], "data.train.loss_weight_key", "warm start"),
        (
            [*ARITHMETIC, *FILES, "data.train.loss_weight_key=w"],
            "data.train.loss_weight_key",
            "warm start",
        ),
        (
            [*RL, "task=dpo", "ref=frozen", "data.train.answer_key=a"],
            "data.train.answer_key",
            "chosen_key",
        ),
        (
            [*SFT, "data.train.messages_key=turns", "data.train.prompt_key=q"],
            "data.train.prompt_key",
            "data.train.messages_key",
        ),
        (
            [*SFT, "data.train.messages_key=turns", "data.train.answer_key=a"],
            "data.train.answer_key",
            "data.train.messages_key",
        ),
        ([*RL, "data.train.route_key=subject"], "data.train.route_key", "teachers"),
        ([*RL, "actor.engine.model.seed=1"], "actor.engine.model.seed", "actor.engine.model.path"),
        (
            [*ARITHMETIC, "actor.engine.model.trust_remote_code=true"],
            "actor.engine.model.trust_remote_code",
            "architecture",
        ),
        (
            [*RL, "ref=frozen", "algorithm.kl_loss_coef=0.1", "ref.engine.schedule.warmup_steps=3"],
            "ref.engine.schedule.warmup_steps",
            "ref.engine.optimizer null",
        ),
    ],
)
def test_setting_without_effect_is_refused_with_the_reason(
    overrides: list[str], key: str, other: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    assert str(caught.value).startswith(f"{key} (command line) has no effect with")
    assert other in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [*RL, "runtime.kind=ray", "runtime.cpus_per_worker=2", "actor.pool=big"],
        [
            *RL,
            "algorithm=ppo",
            "algorithm.advantage.gamma=0.99",
            "algorithm.advantage.gae_lambda=0.9",
        ],
        [*RL, "data.eval.paths=[test.jsonl]", "run.eval_every=5"],
        [*SFT, "data.eval.paths=[test.jsonl]", "run.eval_every=5"],
        [*SFT, "data.eval_sets.a.paths=[a.jsonl]", "data.eval_sets.a.loss_weight_key=weight"],
        [*RL, "batching.num_passes=2", "algorithm.policy_loss.clip_high=0.3"],
        [*RL, "algorithm.kl_reward_coef=0.1", "ref=frozen", "algorithm.policy_loss.clip_low=0.1"],
        [*RL, "data.chat_template=x"],
        [
            *RL,
            "task=dpo",
            "ref=frozen",
            "data.train.chosen_key=good",
            "data.train.rejected_key=bad",
            "data.train.prompt_key=q",
        ],
        [*SFT, "data.train.messages_key=turns", "data.train.extra_keys=[level]"],
        [*RL, "ref=frozen", "algorithm.kl_loss_coef=0.1", "algorithm.kl_estimator=k2"],
        [*ARITHMETIC, "data.train.split=train", "data.train.seed=4", "actor.engine.model.seed=3"],
    ],
)
def test_same_setting_is_accepted_if_it_has_an_effect(overrides: list[str]) -> None:
    load(overrides)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (
            [
                *RL,
                *("data.train.weight=1", "data.train_sets.b.paths=[b.jsonl]"),
                *("data.train_sets.b.weight=1", "data.eval.paths=[c.jsonl]"),
                "data.eval.weight=2",
            ],
            "data.eval.weight",
        ),
        ([*ARITHMETIC, "warm_start.data.weight=2"], "warm_start.data.weight"),
    ],
)
def test_weight_of_data_that_is_not_mixed_is_refused(overrides: list[str], key: str) -> None:
    message = f"{key} .command line. has no effect with data that is not mixed with other sources"
    with pytest.raises(ConfigError, match=message):
        load(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["run.save_in_background=false", "run.save_interval_s=null"],
        ["run.keep_every=0", "run.max_ckpt_to_keep=null"],
        ["algorithm.advantage=reinforce_plus_plus", "algorithm.whiten_advantages=false"],
    ],
)
def test_setting_that_asks_for_nothing_is_accepted(overrides: list[str]) -> None:
    load([*RL, *overrides])


def test_null_may_remove_a_block_of_an_experiment() -> None:
    assert load([*ARITHMETIC, "task=sft", "warm_start=null", "data.eval=null"]).config.task == "sft"


def test_built_in_group_may_contain_settings_without_effect() -> None:
    # The quickstart sets sampling.max_tokens, which task sft does not use; the user did not write
    # it.
    loaded = load(["experiment=quickstart", "task=sft", "warm_start=null", "run.seed=1"])
    assert loaded.origins["sampling.max_tokens"] == "group experiment=quickstart"


def test_users_file_must_not_contain_settings_without_effect(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [temper, _self_]\nruntime: {address: auto}\n")
    with pytest.raises(
        ConfigError,
        match=r"runtime.address \(file .*mine.yaml\) has no effect with runtime.kind inline",
    ):
        load(RL, config_dir=str(tmp_path), config_name="mine")
