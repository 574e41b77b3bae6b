from collections.abc import Callable
from importlib.util import find_spec

import pytest

from temper_engine_api.errors import ConfigError
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.config_loading import load
from temper_trainer.config_loading.loading import _load_engine_config_class
from temper_trainer.config_loading.schema import Plain

from .conftest import RL


def test_quickstart_is_a_small_model_from_scratch_on_arithmetic() -> None:
    config = load(["experiment=quickstart"]).config
    architecture = config.actor.engine.model.architecture
    assert (
        architecture["model_type"],
        architecture["hidden_size"],
        architecture["num_hidden_layers"],
    ) == ("qwen2", 128, 4)
    assert (config.data.train.name, config.data.tokenizer.kind, config.reward.function) == (
        "arithmetic",
        "word_level",
        "gsm8k_strict",
    )
    assert (
        config.algorithm.advantage.name,
        config.algorithm.group_size,
        config.batching.num_mini_batches,
    ) == ("grpo", 8, 1)


def test_quickstart_is_evaluated_on_problems_never_trained_on_greedy_and_sampled() -> None:
    config = load(["experiment=quickstart"]).config
    assert config.data.eval is not None
    assert (config.data.train.split, config.data.eval.split, config.data.eval.max_rows) == (
        "train",
        "test",
        500,
    )
    assert (
        config.run.eval_sampling.temperature,
        config.run.eval_sampled,
        config.sampling.temperature,
    ) == (0.0, True, 1.0)


def test_warm_start_demonstrations_are_imperfect_and_each_seen_once() -> None:
    warm_start = load(["experiment=quickstart"]).config.warm_start
    assert warm_start is not None
    assert warm_start.data is not None
    assert warm_start.data.max_rows == warm_start.total_steps * warm_start.batch_size
    assert warm_start.data.wrong_first_operation == 0.5


def test_roles_are_configured_by_the_engines_own_class() -> None:
    config = load([*RL, "actor.engine.activation_checkpointing=true"]).config
    assert isinstance(config.actor.engine, FSDPConfig)
    assert config.actor.engine.activation_checkpointing is True


def test_setting_one_key_keeps_the_other_defaults_of_its_block() -> None:
    # eval_sampling is greedy although SamplingConfig's own temperature is 1.
    config = load([*RL, "data.eval.paths=[test.jsonl]", "run.eval_sampling.max_tokens=9"]).config
    assert config.run.eval_sampling == SamplingConfig(temperature=0.0, max_tokens=9)


def test_ppo_adds_a_critic_with_the_actors_architecture() -> None:
    config = load([*RL, "algorithm=ppo", "actor.engine.precision.compute=fp32"]).config
    assert config.algorithm.advantage.name == "gae"
    assert config.critic is not None
    assert (config.critic.engine.model.path, config.critic.engine.model.model_type) == (
        "model",
        "value_model",
    )
    assert config.critic.engine.precision.compute == "fp32"


def test_overriding_the_critic_does_not_change_the_actor() -> None:
    config = load(
        [
            *RL,
            "algorithm=ppo",
            "critic.engine.precision.compute=fp32",
            "critic.engine.model.path=other",
        ]
    ).config
    assert config.critic is not None
    assert (config.critic.engine.precision.compute, config.critic.engine.model.path) == (
        "fp32",
        "other",
    )
    assert (config.actor.engine.precision.compute, config.actor.engine.model.path) == (
        "bf16",
        "model",
    )


def test_reference_is_frozen_and_starts_from_the_actors_weights() -> None:
    config = load([*RL, "ref=frozen", "algorithm.kl_loss_coef=0.01"]).config
    assert config.ref is not None
    assert (config.ref.engine.optimizer, config.ref.engine.model.path) == (None, "model")


def test_group_choice_can_be_reverted() -> None:
    assert load([*RL, "critic=value_model", "critic=null"]).config.critic is None
    assert load(["experiment=quickstart", "critic=none"]).config.critic is None


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "ppo"])
def test_every_algorithm_composes_with_the_quickstart(algorithm: str) -> None:
    config = load(["experiment=quickstart", f"algorithm={algorithm}"]).config
    assert config.algorithm.advantage.name == ("gae" if algorithm == "ppo" else algorithm)


@pytest.mark.parametrize("experiment", ["gsm8k_sft", "gsm8k_grpo", "gsm8k_ppo"])
def test_every_gsm8k_experiment_needs_only_the_paths(experiment: str) -> None:
    assert (
        load([f"experiment={experiment}", "data.train.paths=[train.jsonl]"]).config.run.dir
        == f"runs/{experiment}"
    )


def test_deleting_an_override_restores_the_default() -> None:
    loaded = load(["experiment=quickstart", "~run.total_steps"])
    assert (loaded.config.run.total_steps, loaded.origins["run.total_steps"]) == (100, "default")


def test_model_directory_can_replace_an_architecture() -> None:
    model = load(
        ["experiment=quickstart", "~actor.engine.model.architecture", "actor.engine.model.path=dir"]
    ).config.actor.engine.model
    assert (model.path, dict(model.architecture)) == ("dir", {})


def test_architecture_may_have_lists() -> None:
    loaded = load(
        ["experiment=quickstart", "actor.engine.model.architecture.layer_types=[full_attention]"]
    )
    assert loaded.config.actor.engine.model.architecture["layer_types"] == ("full_attention",)
    assert loaded.resolved["actor"]["engine"]["model"]["architecture"]["layer_types"] == [
        "full_attention"
    ]


def test_hydras_plus_prefix_is_accepted() -> None:
    loaded = load([*RL, "+run.seed=7", "++run.dir=there", "+reward.arguments.scale=2.5"])
    assert (loaded.config.run.seed, loaded.config.run.dir) == (7, "there")
    assert loaded.config.reward.arguments == {"scale": 2.5}


def test_interpolations_can_refer_to_defaults() -> None:
    assert load([*RL, "run.dir=runs/seed-${run.seed}"]).config.run.dir == "runs/seed-0"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("+reward.arguments.x=${run.seed}", 7),
        # A key that is a reference itself, a part of a text, an item of a list, a relative key.
        ("+reward.arguments.x=${reward.arguments.w}", 7),
        ("+reward.arguments.x='seed ${run.seed}'", "seed 7"),
        ("+reward.arguments.x='${data.train.paths.0}'", "train.jsonl"),
        ("+reward.arguments.x=${.y}", 3),
        ("+reward.arguments.x=${data.eval}", None),
    ],
)
def test_interpolations_have_the_value_of_the_key(setting: str, expected: Plain) -> None:
    given = ("run.seed=7", "+reward.arguments={w:'${run.seed}',y:3}")
    loaded = load([*RL, *given, setting]).resolved
    assert loaded["reward"]["arguments"]["x"] == expected


def test_interpolation_that_refers_to_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run.dir: .*(recursive|Recursive)"):
        load([*RL, "run.dir=${run.dir}"])


def test_interpolation_of_a_missing_key_names_both() -> None:
    with pytest.raises(
        ConfigError, match=r"sampling.max_tokens: Interpolation key 'run.nope' not found"
    ):
        load([*RL, "sampling.max_tokens=${run.nope}"])


@pytest.mark.skipif(
    find_spec("temper_engine_megatron") is None, reason="needs temper-engine-megatron"
)
def test_megatron_engine_is_configured_by_its_own_fields() -> None:
    config = load(
        [
            *RL,
            "model_engine=megatron",
            "actor.engine.tensor_parallel=2",
            "actor.num_workers=2",
            "runtime.kind=ray",
        ]
    ).config
    assert type(config.actor.engine).__name__ == "MegatronConfig"
    assert config.actor.engine.tensor_parallel == 2


def test_missing_engine_is_refused_with_the_installed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("temper_engine_api.registry.entry_points", lambda *, group: [])
    _load_engine_config_class.cache_clear()  # an earlier test may have found it
    with pytest.raises(
        ConfigError,
        match=r"model_engine is megatron, but no engine is called 'megatron'; installed are: none. "
        r"Install it with pip install ./packages/engine-megatron",
    ):
        load([*RL, "model_engine=megatron"])


def test_missing_engine_group_is_refused_with_the_installed_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model_engine is nope, but no engine is called 'nope'; installed are: fsdp",
    ):
        load([*RL, "model_engine=nope"])


def test_engine_of_a_third_party_needs_only_its_entry_point(
    install: Callable[[str, str], None],
) -> None:
    install(
        "[temper.engine_configs]\nfast = third_party_engine:FastConfig\n",
        "from dataclasses import dataclass\n"
        "from temper_engine_api.specs import EngineConfig\n"
        "\n"
        "@dataclass(frozen=True, slots=True, kw_only=True)\n"
        "class FastConfig(EngineConfig):\n"
        "    speed: int = 1\n",
    )
    loaded = load([*RL, "model_engine=fast", "actor.engine.speed=3"])
    assert (loaded.config.model_engine, loaded.resolved["actor"]["engine"]["speed"]) == ("fast", 3)  # type: ignore[index,call-overload]
    assert loaded.origins["model_engine"] == "command line"


def test_loading_twice_in_one_process_gives_equal_results() -> None:
    first = load(["experiment=quickstart", "run.seed=3"])
    load([*RL, "algorithm=ppo"])
    assert load(["experiment=quickstart", "run.seed=3"]) == first


def test_result_can_be_sent_to_another_process() -> None:
    import pickle

    config = load(["experiment=quickstart", "algorithm=ppo"]).config
    assert pickle.loads(pickle.dumps(config)) == config
